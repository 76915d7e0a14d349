"""Model FLOPs of training: the matrix products that the model needs, whatever is recomputed or padded."""

from dataclasses import dataclass

from megamoe.config.schema import RunConfig
from megamoe.config.shapes import (
    expert_activation,
    expert_ffn_size,
    ffn_size,
    moe_block_numbers,
    padded_vocab_size,
)
from megamoe.moe.experts.activations import up_width

PASSES = 3  # forward, and in backward the gradients of the inputs and of the weights


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one training step's forward and backward pass, 2 for a multiply-add.

    token: for each token, without routed experts. pair: for each computed (token, expert) pair.
    Attention counts its causal half over whole sequences, the router one row of scores for each expert.
    """

    token: float
    pair: float

    def of_step(self, tokens: int, pairs: int) -> float:
        """Return the FLOPs of a step over this many tokens, with so many pairs in all layers."""
        return tokens * self.token + pairs * self.pair


def model_flops(config: RunConfig, vocab_size: int) -> ModelFlops:
    """Return the FLOPs of the model that `config` describes; `vocab_size` before padding.

    As Narayanan et al. 2021, appendix (2104.04473), count them, but with half of the attention scores, and
    with the pairs that the routers chose instead of a fixed number of experts.
    """
    model, moe = config.model, config.moe
    hidden = model.hidden_size
    groups = model.num_query_groups or model.num_attention_heads
    head = hidden // model.num_attention_heads
    attention = hidden * (hidden + 2 * groups * head) + hidden * hidden
    scores = 2 * hidden * config.data.sequence_length / 2  # queries x keys, and their weights x values
    dense_ffn = hidden * (up_width(ffn_size(model), model.activation) + ffn_size(model))
    size = expert_ffn_size(config)
    expert = hidden * (up_width(size, expert_activation(config)) + size)
    blocks = len(moe_block_numbers(moe, model.num_layers))
    layers = blocks + len(set(moe.layers.insert_after))
    products = (
        model.num_layers * (attention + scores)
        + (model.num_layers - blocks) * dense_ffn
        + layers * (moe.num_experts * hidden + moe.num_shared_experts * expert)
        + padded_vocab_size(vocab_size, model.vocab_multiple) * hidden
    )
    return ModelFlops(PASSES * 2.0 * products, PASSES * 2.0 * moe.expert_sublayers * expert)
