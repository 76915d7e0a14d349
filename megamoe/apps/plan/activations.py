"""An estimate of the bytes that the backward pass needs, for layouts that are not simulated."""

from megamoe.config import RunConfig, shapes
from megamoe.config.layer_kinds import kinds
from megamoe.config.schema import Activation
from megamoe.moe.experts.activations import num_halves
from megamoe.moe.router import mean_choices
from megamoe.parallel.zero.deepspeed_config import ParallelPlan


def activation_bytes(config: RunConfig, vocab_size: int, plan: ParallelPlan, rollouts: int = 1) -> float:
    """Estimate the bytes that backward needs.

    They are about 14 hidden vectors per block, the FFN's inner ones, and three times the logits in fp32.
    Tensor parallelism divides all but 10 / 34 of the first; with sequence parallelism those too (Korthikanti
    et al. 2022, section 4).
    """
    model = config.model
    tokens = config.train.micro_batch_size * config.data.sequence_length * rollouts
    width, ranks = 4 if plan.precision == "fp32" else 2, plan.layout.tensor
    if "block" in shapes.recomputed_modules(model):  # the blocks' inputs, and one block's values in backward
        inputs = shapes.num_blocks(config) * model.hidden_size / (ranks if config.parallel.sequence else 1)
        kept = inputs + _block_width(config) / shapes.num_blocks(config)
    else:
        kept = _block_width(config)
    logits = 12 * vocab_size / ranks if model.num_labels is None else 0.0
    # The first of p stages has 1 / p of the blocks, and keeps the values of p micro batches.
    # Of two micro batches in flight, both are kept.
    return float(config.train.in_flight * tokens * (width * kept + logits) / config.parallel.context)


def _block_width(config: RunConfig) -> float:
    """Return the values per token that all blocks keep together."""
    model = config.model
    dense = shapes.num_blocks(config) - len(shapes.moe_block_numbers(config))
    inner: float = _ffn_width(model.activation) * dense * shapes.ffn_size(model)
    again = shapes.recomputed_modules(model)
    for kind in kinds(config):
        if kind.layers and "moe_layer" not in again:
            inner += len(kind.layers) * _layer_width(kind.config)
    ranks = config.parallel.tensor
    undivided = 0 if config.parallel.sequence else 10 / 34
    share = undivided + (1 - undivided) / ranks
    vectors = 14 - (2 if "norms" in again else 0)
    return vectors * share * shapes.num_blocks(config) * model.hidden_size + inner / ranks


def _layer_width(config: RunConfig) -> float:
    """Return the values per token that an MoE layer keeps; config: of its kind."""
    moe, again, size = config.moe, shapes.recomputed_modules(config.model), shapes.expert_ffn_size(config)
    shared = 0 if "shared_experts" in again else shapes.shared_ffn_size(moe, size) / size
    chosen = mean_choices(moe) * moe.expert_sublayers
    width, hidden = _ffn_width(shapes.expert_activation(config)) * size, 3 * config.model.hidden_size
    rows = 3 * shapes.expert_hidden_size(config)
    latent = 2 * (moe.latent_size or 0)  # a token's row before the dispatch and after the combine
    return chosen * ((0 if "moe" in again else width) + rows) + latent + shared * (width + hidden)


def _ffn_width(activation: Activation) -> int:
    """Return the values that an FFN keeps per unit of its size: before and after the activation, and for a
    gated activation the value twice.
    """
    return 2 * num_halves(activation)
