"""Model FLOPs of training: the matrix products that the model needs, whatever is recomputed or padded."""

from dataclasses import dataclass, field

from megamoe.config.schema import ModelConfig, RunConfig
from megamoe.config.shapes import (
    Stack,
    expert_activation,
    expert_ffn_size,
    ffn_size,
    key_size,
    padded_vocab_size,
    query_size,
    shared_ffn_size,
    stacks,
    window_of,
)
from megamoe.model.attention.latent_size import latent_scores, latent_weights
from megamoe.moe.experts.activations import up_width

PASSES = 3  # forward, and in backward the gradients of the inputs and of the weights


@dataclass(frozen=True)
class StackShares:
    """Tokens for each token of `data.sequence_length`: of the stacks, by name, and of the output layer."""

    stacks: dict[str, float] = field(default_factory=dict)  # 1 where a stack is not named
    predicted: float = 1.0


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one training step's forward and backward pass, 2 for a multiply-add.

    token: for each token, without routed experts. pair: for each computed (token, expert) pair.
    Causal attention counts its half over whole sequences, the router one row of scores for each expert.
    """

    token: float
    pair: float

    def of_step(self, tokens: int, pairs: int) -> float:
        """Return the FLOPs of a step over this many tokens, with so many pairs in all layers."""
        return tokens * self.token + pairs * self.pair


def model_flops(config: RunConfig, vocab_size: int, shares: StackShares | None = None) -> ModelFlops:
    """Return the FLOPs of the model that `config` describes; `vocab_size` before padding.

    shares: of an objective that does not compute every token of the data in every stack.

    As Narayanan et al. 2021, appendix (2104.04473), count them, but with half of the scores of causal
    attention, and with the pairs that the routers chose instead of a fixed number of experts.
    """
    model, moe = config.model, config.moe
    shares = shares or StackShares()
    hidden, length = model.hidden_size, config.data.sequence_length
    size = expert_ffn_size(config)
    expert = hidden * (up_width(size, expert_activation(config)) + size)
    shared = expert * shared_ffn_size(moe, size) / size
    products = 0.0
    for stack in stacks(config):
        share = shares.stacks.get(stack.name, 1.0)
        blocks, layers = len(stack.moe_blocks), len(stack.moe_blocks) + len({*stack.layers.insert_after})
        of_token = float(stack.num_layers * _projections(model))
        of_token += _scores(model) * _seen_keys(model, stack, share * length)
        of_token += (stack.num_layers - blocks) * _dense_ffn(model)
        of_token += layers * (moe.num_experts * hidden + shared)
        products += share * of_token
    if model.architecture == "encoder_decoder":
        encoder, decoder = (shares.stacks.get(name, 1.0) for name in ("encoder", "decoder"))
        # Queries and outputs for each decoder token, keys and values for each of the encoder's, and scores.
        size = query_size(model)
        of_block = 2 * hidden * size * (encoder + decoder) + 2 * size * decoder * encoder * length
        products += model.num_layers * of_block
    if model.num_labels is not None:  # for each token, or once for a sequence
        times = shares.stacks.get("encoder", 1.0) if model.predicts in ("tags", "span") else 1 / length
        products += hidden * ((hidden if model.pooler else 0) + model.num_labels) * times
    depth = model.multi_token_prediction.depth
    products += depth * 2 * hidden * hidden
    products += (1 + depth) * shares.predicted * padded_vocab_size(vocab_size, model.vocab_multiple) * hidden
    return ModelFlops(PASSES * 2.0 * products, PASSES * 2.0 * moe.expert_sublayers * expert)


def _projections(model: ModelConfig) -> int:
    """Return the products of one token in the linear layers of self-attention."""
    if model.latent is not None:
        return latent_weights(model, model.latent)
    return model.hidden_size * (2 * query_size(model) + 2 * key_size(model))


def _seen_keys(model: ModelConfig, stack: Stack, length: float) -> float:
    """Return the mean number of keys that a query of `length` tokens sees, summed over the blocks."""
    if stack.name == "encoder":
        return stack.num_layers * length
    blocks = list(range(1, stack.num_layers + 1))
    if stack.name == "prediction":  # of the kind of the last block
        blocks = [model.num_layers] * stack.num_layers
    windows = (window_of(model, block) or length for block in blocks)
    # The first `window` queries see half of it on average, the others all of it.
    return sum(window - window * window / (2 * length) for window in (min(w, length) for w in windows))


def _scores(model: ModelConfig) -> int:
    """Return the products of one query with one key, and of its weight with the value, in all heads."""
    if model.latent is not None:
        return latent_scores(model, model.latent)
    return 2 * query_size(model)


def _dense_ffn(model: ModelConfig) -> int:
    return model.hidden_size * (up_width(ffn_size(model), model.activation) + ffn_size(model))
