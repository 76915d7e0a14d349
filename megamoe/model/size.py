"""The number of parameters and the FLOPs of a model, from its configuration alone; nothing is allocated."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from megamoe.config import shapes
from megamoe.config.layer_kinds import LayerKind, kinds
from megamoe.config.schema import Activation, ModelConfig, RunConfig
from megamoe.model.attention.latent import latent_norms, latent_scores, latent_weights
from megamoe.moe.experts.activations import up_width
from megamoe.moe.part import Dims
from megamoe.moe.router import Router, build_part, mean_choices
from megamoe.registry import get_part


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters.

    total: of the whole model. active: those that compute a token, with the selector's mean number of experts
    (one, if unknown). expert: of all routed experts; frozen: of those that do not learn. tensor_sharded:
    those that tensor parallelism splits (embedding and output layer, attention, dense FFNs). moe_dense: of
    the MoE layers without their routed experts (routers, shared experts). matrices: of `expert`, of
    `tensor_sharded` and of all others, those in matrices that Muon updates.
    """

    total: int
    active: int
    expert: int
    tensor_sharded: int
    moe_dense: int
    matrices: tuple[int, int, int] = (0, 0, 0)
    frozen: int = 0

    def matrices_on_rank(self, tensor_parallel: int, expert_ranks: int) -> tuple[float, float]:
        """Return those of one rank that are in matrices; see `on_rank`."""
        experts, sharded, others = self.matrices
        return sharded / tensor_parallel + others, experts / expert_ranks

    def on_rank(self, tensor_parallel: int, expert_ranks: int) -> tuple[float, float]:
        """Return one rank's parameters: outside of the routed experts, and inside.

        expert_ranks: the number of ranks that together hold all experts once.
        """
        whole = self.total - self.expert - self.tensor_sharded
        return self.tensor_sharded / tensor_parallel + whole, self.expert / expert_ranks


def part_shapes(config: RunConfig, vocab_size: int) -> dict[str, list[int]]:
    """Return the shape of every tensor of one MoE layer's router parts and losses, by its name in the layer.

    config: one without `moe.groups`, such as `LayerKind.config`. Names have the form router.<stage>.<tensor>
    and losses.<name>.<tensor>; `vocab_size` is before padding.
    """
    padded = shapes.padded_vocab_size(vocab_size, config.model.vocab_multiple)
    tensors = nn.ModuleDict(_parts(config, padded)).state_dict()
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def model_size(config: RunConfig, vocab_size: int) -> ModelSize:
    """Count the parameters of the model that `config` describes; `vocab_size` before padding."""
    model = config.model
    blocks, moe_blocks = shapes.num_blocks(config), len(shapes.moe_block_numbers(config))
    dense = embedding_size(config, vocab_size) + blocks * _attention(model) + final_norms(config)
    dense += _num_cross(model) * _cross_attention(model)
    dense += (blocks - moe_blocks) * _dense_ffn(model)
    sharded = dense - _replicated(config, blocks - moe_blocks)
    dense += _whole_head(model)
    dense += model.multi_token_prediction.depth * (2 * model.hidden_size**2 + 2 * _norm(model))
    size = ModelSize(dense, dense, 0, sharded, 0, _matrices(config))
    for kind in kinds(config):
        if kind.layers:
            size = _with_layers(size, kind, shapes.padded_vocab_size(vocab_size, model.vocab_multiple))
    return size


def _with_layers(size: ModelSize, kind: LayerKind, padded_vocab: int) -> ModelSize:
    """Return the size with the MoE layers of one kind."""
    config, moe = kind.config, kind.moe
    inserted = len(shapes.inserted_after(config))
    layers = len(shapes.moe_block_numbers(config)) + inserted
    parts = _parts(config, padded_vocab)
    counts = [parameter.numel() for part in parts.values() for parameter in part.parameters()]
    constant = 3 * config.model.hidden_size * moe.zero_experts.constant
    shared, gates = _shared(config)
    moe_dense = layers * (sum(counts) + shared + gates + _latent(config) + constant)
    dense = moe_dense + (inserted * _norm(config.model) if shapes.inserted_has_norm(moe) else 0)
    each = layers * _expert(config)
    expert = moe.num_experts * each
    beside_in_matrices = layers * (shared + _latent(config))
    experts_in_matrices = layers * moe.num_experts * moe.expert_sublayers * _expert_weights(config)
    return ModelSize(
        size.total + dense + expert,
        size.active + dense + round(mean_choices(moe) * each),
        size.expert + expert,
        size.tensor_sharded,
        size.moe_dense + moe_dense,
        (size.matrices[0] + experts_in_matrices, size.matrices[1], size.matrices[2] + beside_in_matrices),
        size.frozen + ("experts" in moe.frozen) * expert,
    )


def _matrices(config: RunConfig) -> tuple[int, int, int]:
    """Return `ModelSize.matrices` without those of the MoE layers."""
    model, hidden = config.model, config.model.hidden_size
    blocks = shapes.num_blocks(config)
    sharded = blocks * _projections(model) + _num_cross(model) * 4 * hidden * shapes.query_size(model)
    dense = blocks - len(shapes.moe_block_numbers(config))
    sharded += dense * _weights(hidden, shapes.ffn_size(model), model.activation)
    return 0, sharded, model.multi_token_prediction.depth * 2 * hidden**2


def embedding_size(config: RunConfig, vocab_size: int) -> int:
    """Count the embeddings and an output layer of its own; `vocab_size` before padding."""
    return math.prod(token_embeddings(config, vocab_size)) + position_size(config)


def token_embeddings(config: RunConfig, vocab_size: int) -> tuple[int, int]:
    """Return the size of the token embedding, and 2 with an output layer of its own of that size, else 1."""
    model = config.model
    size = shapes.padded_vocab_size(vocab_size, model.vocab_multiple) * model.hidden_size
    return size, 1 if model.tie_embeddings or model.num_labels else 2


def position_size(config: RunConfig) -> int:
    """Count the weights of learned positions."""
    model = config.model
    return config.data.sequence_length * model.hidden_size if model.position == "learned" else 0


def _replicated(config: RunConfig, num_ffns: int) -> int:
    """Return the parameters outside of MoE layers that every tensor-parallel rank holds whole: learned
    positions, norms, and the biases of row-parallel layers.
    """
    model, blocks, crosses = config.model, shapes.num_blocks(config), _num_cross(config.model)
    biases = model.hidden_size * num_ffns if model.bias else 0
    biases += model.hidden_size * (blocks + crosses) if shapes.has_output_bias(model) else 0
    norms = (
        (2 * blocks + crosses) * _norm(model) + blocks * _query_key_norms(model, "head") + final_norms(config)
    )
    latent = 0 if model.latent is None else blocks * latent_norms(model, model.latent)
    return position_size(config) + norms + biases + latent


def final_norms(config: RunConfig) -> int:
    """Return the parameters of the norms behind the last blocks, which post-norm blocks do not need."""
    ends = sum(stack.num_layers if stack.name == "prediction" else 1 for stack in shapes.stacks(config))
    return ends * _norm(config.model) if config.model.norm_position == "pre" else 0


def _whole_head(model: ModelConfig) -> int:
    """Return the parameters of the head that every tensor-parallel rank holds whole."""
    hidden = model.hidden_size
    if model.num_labels is not None:
        pooler = hidden * hidden + hidden if model.pooler else 0
        return pooler + model.num_labels * (hidden + 1)
    return hidden * hidden + hidden + _norm(model) if model.head_transform else 0


def _num_cross(model: ModelConfig) -> int:
    """Return the number of blocks with cross attention."""
    return model.num_layers if model.architecture == "encoder_decoder" else 0


def _cross_attention(model: ModelConfig) -> int:
    """Return the parameters of one block's cross attention and its norm; queries have no groups there."""
    size = 4 * model.hidden_size * shapes.query_size(model)
    return size + _attention_biases(model) + _norm(model)


def _norm(model: ModelConfig) -> int:
    return model.hidden_size * _norm_vectors(model)


def _norm_vectors(model: ModelConfig) -> int:
    return 2 if model.norm == "layernorm" else 1


def _attention(model: ModelConfig) -> int:
    """Return the parameters of one block's attention and its two norms."""
    if model.latent is not None:
        own = latent_weights(model, model.latent) + latent_norms(model, model.latent)
    else:
        own = model.hidden_size * (2 * shapes.query_size(model) + 2 * shapes.key_size(model))
        own += _query_key_norms(model)
    sinks = model.num_attention_heads if model.attention.sinks else 0
    return own + _attention_biases(model) + 2 * _norm(model) + sinks


def _attention_biases(model: ModelConfig) -> int:
    inputs = shapes.query_size(model) + 2 * shapes.key_size(model) if shapes.has_input_bias(model) else 0
    return inputs + (model.hidden_size if shapes.has_output_bias(model) else 0)


def _query_key_norms(model: ModelConfig, *kinds: str) -> int:
    """Return the parameters of norms of queries and keys, if they are of these kinds: `head`, which all heads
    share, or `whole`, over all heads together, which tensor parallelism splits. Default: either.
    """
    sizes = {"head": 2 * shapes.head_size(model), "whole": shapes.query_size(model) + shapes.key_size(model)}
    kind = model.attention.query_key_norm
    return sizes[kind] * _norm_vectors(model) if kind in (kinds or sizes) else 0


def _dense_ffn(model: ModelConfig) -> int:
    biases = up_width(shapes.ffn_size(model), model.activation) + model.hidden_size if model.bias else 0
    return _weights(model.hidden_size, shapes.ffn_size(model), model.activation) + biases


def _weights(hidden: int, size: int, activation: Activation) -> int:
    """Return the weights of an FFN's two products."""
    return hidden * up_width(size, activation) + size * hidden


def _expert_weights(config: RunConfig) -> int:
    """Return the weights of one sub-layer of an expert."""
    hidden, size = shapes.expert_hidden_size(config), shapes.expert_ffn_size(config)
    return _weights(hidden, size, shapes.expert_activation(config))


def _expert(config: RunConfig) -> int:
    hidden, size = shapes.expert_hidden_size(config), shapes.expert_ffn_size(config)
    ffn = _expert_weights(config)
    ffn += up_width(size, shapes.expert_activation(config)) + hidden if config.moe.expert_bias else 0
    sublayers = config.moe.expert_sublayers
    return ffn if sublayers == 1 else sublayers * (ffn + _norm(config.model))


def _shared(config: RunConfig) -> tuple[int, int]:
    """Return the weights of the shared experts, and the parameters that mix them with the routed ones."""
    moe, hidden = config.moe, config.model.hidden_size
    if moe.num_shared_experts == 0:
        return 0, 0
    gates = {"sum": 0, "gated": hidden, "residual": 2 * hidden + 2}[moe.shared_expert_mode]
    size = shapes.shared_ffn_size(moe, shapes.expert_ffn_size(config))
    return _weights(hidden, size, shapes.expert_activation(config)), gates


def _latent(config: RunConfig) -> int:
    """Return the weights of the projections to the experts' latent space and back."""
    return 2 * config.model.hidden_size * (config.moe.latent_size or 0)


def _parts(config: RunConfig, vocab_size: int) -> dict[str, nn.Module]:
    """Return a layer's router and losses on the meta device, which allocates nothing."""
    moe = config.moe
    sizes = config.model.hidden_size, shapes.routed_experts(moe)
    with torch.device("meta"):
        router = Router(moe.router, Dims(*sizes, vocab_size=vocab_size, num_zero=moe.zero_experts.total))
        losses = {name: build_part(choice, router.dims) for name, choice in moe.losses.items()}
    return {"router": router, "losses": nn.ModuleDict(losses)}


PASSES = 3  # forward, and in backward the gradients of the inputs and of the weights


@dataclass(frozen=True)
class StackShares:
    """Tokens for each token of `data.sequence_length`: of the stacks, by name, and of the output layer."""

    stacks: dict[str, float] = field(default_factory=dict)  # 1 where a stack is not named
    predicted: float = 1.0


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one training step's forward and backward pass, 2 for a multiply-add.

    token: for each token, without routed experts. pair: for each computed (token, expert) pair. by_layer: of
    a pair in each MoE layer, by its block number, where `moe.groups` makes them differ; `pair` is then their
    mean. Causal attention counts its half over whole sequences, the router one row of scores for each expert.
    """

    token: float
    pair: float
    by_layer: dict[int, float] = field(default_factory=dict)

    def of_step(self, tokens: int, pairs: Mapping[int, int]) -> float:
        """Return the FLOPs of a step over this many tokens; pairs: in each MoE layer, by its number."""
        if not self.by_layer:
            return tokens * self.token + sum(pairs.values()) * self.pair
        return tokens * self.token + sum(count * self.by_layer[layer] for layer, count in pairs.items())


def model_flops(config: RunConfig, vocab_size: int, shares: StackShares | None = None) -> ModelFlops:
    """Return the FLOPs of the model that `config` describes; `vocab_size` before padding.

    shares: of an objective that does not compute every token of the data in every stack.

    As Narayanan et al. 2021, appendix (2104.04473), count them, but with half of the scores of causal
    attention, and with the pairs that the routers chose instead of a fixed number of experts.
    """
    model = config.model
    shares = shares or StackShares()
    hidden, length = model.hidden_size, config.data.sequence_length
    works = {number: layer_products(kind.config) for kind in kinds(config) for number in kind.layers}
    products = 0.0
    of_prediction = shares.stacks.get("decoder", 1.0)  # its blocks compute the decoder's tokens
    for stack in shapes.stacks(config):
        share = of_prediction if stack.name == "prediction" else shares.stacks.get(stack.name, 1.0)
        layers = [works[stack.first - 1 + block][0] for block in stack.moe_layers]
        of_token = float(stack.num_layers * _projections(model))
        of_token += _scores(model) * _seen_keys(model, stack, share * length)
        of_token += (stack.num_layers - len(stack.moe_blocks)) * dense_ffn_products(model)
        of_token += sum(layers)
        products += share * of_token
    if model.architecture == "encoder_decoder":
        encoder, decoder = (shares.stacks.get(name, 1.0) for name in ("encoder", "decoder"))
        # Queries and outputs for each decoder token, keys and values for each of the encoder's, and scores.
        size = shapes.query_size(model)
        of_block = 2 * hidden * size * (encoder + decoder) + 2 * size * decoder * encoder * length
        products += model.num_layers * of_block
    if model.num_labels is not None:  # for each token, or once for a sequence
        times = shares.stacks.get("encoder", 1.0) if model.predicts in ("tags", "span") else 1 / length
        products += hidden * ((hidden if model.pooler else 0) + model.num_labels) * times
    if model.head_transform:
        products += shares.predicted * hidden * hidden
    depth = model.multi_token_prediction.depth
    products += of_prediction * depth * 2 * hidden * hidden
    products += (
        (1 + depth) * shares.predicted * shapes.padded_vocab_size(vocab_size, model.vocab_multiple) * hidden
    )
    token = PASSES * 2.0 * products
    if not config.moe.groups:
        return ModelFlops(token, PASSES * 2.0 * layer_products(config)[1])
    by_layer = {number: PASSES * 2.0 * pair for number, (_, pair) in works.items()}
    return ModelFlops(token, sum(by_layer.values()) / len(by_layer), by_layer)


def layer_products(config: RunConfig) -> tuple[float, float]:
    """Return the products of a token in router, shared experts and latent projections of an MoE layer, and
    of each of its pairs.

    config: one without `moe.groups`, such as `LayerKind.config`.
    """
    moe, hidden, size = config.moe, config.model.hidden_size, shapes.expert_ffn_size(config)
    width = up_width(size, shapes.expert_activation(config)) + size
    beside = hidden * width * shapes.shared_ffn_size(moe, size) / size + _latent(config)
    expert = shapes.expert_hidden_size(config) * width
    beside += 3 * hidden * moe.zero_experts.constant
    experts = shapes.routed_experts(moe)
    if get_part("residual", moe.router.residual.name).reads_before:
        beside += experts * experts
    return experts * hidden + beside, moe.expert_sublayers * expert


def block_flops(config: RunConfig, vocab_size: int) -> tuple[list[float], float]:
    """Return the FLOPs of a token in each block of a decoder, and in what follows them.

    These are the output layer and multi-token prediction. MoE layers count with the mean number of experts
    that a router chooses (`mean_choices`). vocab_size: before padding.
    """
    model = config.model
    stack, *further = shapes.stacks(config)
    length = float(config.data.sequence_length)
    layers: dict[int, float] = {}
    for kind in kinds(config):
        beside, pair = layer_products(kind.config)
        work = beside + mean_choices(kind.moe) * pair if kind.layers else 0.0
        layers |= dict.fromkeys(kind.layers, work)

    def of(block: int, is_moe: bool) -> float:
        keys = min(shapes.window_of(model, block) or length, length)
        scores = _scores(model) * (keys - keys * keys / (2 * length))
        return _projections(model) + scores + (layers[block] if is_moe else dense_ffn_products(model))

    blocks = [of(block, block in stack.moe_blocks) for block in range(1, stack.num_layers + 1)]
    for block in stack.layers.insert_after:
        blocks[block - 1] += layers[block]
    depth = sum(each.num_layers for each in further)
    head = shapes.padded_vocab_size(vocab_size, model.vocab_multiple) * model.hidden_size
    is_moe = bool(further and further[0].moe_blocks)
    module = of(model.num_layers, is_moe) + 2 * model.hidden_size**2
    if further and further[0].layers.insert_after:
        module += layers[model.num_layers]
    after = (1 + depth) * head + depth * module
    return [PASSES * 2.0 * work for work in blocks], PASSES * 2.0 * after


def _projections(model: ModelConfig) -> int:
    """Return the products of one token in the linear layers of self-attention."""
    if model.latent is not None:
        return latent_weights(model, model.latent)
    return model.hidden_size * (2 * shapes.query_size(model) + 2 * shapes.key_size(model))


def _seen_keys(model: ModelConfig, stack: shapes.Stack, length: float) -> float:
    """Return the mean number of keys that a query of `length` tokens sees, summed over the blocks."""
    if stack.name == "encoder":
        return stack.num_layers * length
    blocks = list(range(1, stack.num_layers + 1))
    if stack.name == "prediction":  # of the kind of the last block
        blocks = [model.num_layers] * stack.num_layers
    windows = (shapes.window_of(model, block) or length for block in blocks)
    # The first `window` queries see half of it on average, the others all of it.
    return sum(window - window * window / (2 * length) for window in (min(w, length) for w in windows))


def _scores(model: ModelConfig) -> int:
    """Return the products of one query with one key, and of its weight with the value, in all heads."""
    if model.latent is not None:
        return latent_scores(model, model.latent)
    return 2 * shapes.query_size(model)


def dense_ffn_products(model: ModelConfig) -> int:
    """Return the products of one token in a block's dense FFN."""
    return model.hidden_size * (up_width(shapes.ffn_size(model), model.activation) + shapes.ffn_size(model))
