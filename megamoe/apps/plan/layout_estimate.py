"""Estimates a layout by formulas; the search of layouts simulates the best of them.

The formulas count what depends on the layout: products, passes over activations, launches, traffic, states.
Their constants were chosen by the activations and kernels of simulated steps; docs/scale/plan.md says how
well they order.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

from megamoe.apps.plan.activations import activation_bytes
from megamoe.apps.plan.assumptions import ASSUMED
from megamoe.apps.plan.hardware import Gpu
from megamoe.apps.plan.traffic import context_traffic, cut_pair_traffic, moe_traffic
from megamoe.config import RunConfig
from megamoe.config.layer_kinds import LayerKind, kinds
from megamoe.config.shapes import (
    expert_ffn_size,
    expert_hidden_size,
    key_size,
    moe_block_numbers,
    num_blocks,
    padded_vocab_size,
    query_size,
    recomputed_modules,
)
from megamoe.errors import UserError
from megamoe.model.size import ModelFlops, ModelSize, block_flops, model_flops, model_size
from megamoe.model.stage import blocks_of_parts
from megamoe.moe.dispatch.choice import mean_nodes
from megamoe.moe.router import mean_choices
from megamoe.optim.schedule import BatchSchedule
from megamoe.parallel.zero.deepspeed_config import ParallelPlan
from megamoe.validation.memory import states_of

PASSES = 6  # over what a block keeps: forward, and twice as much backward, each read and written
LOGIT_BYTES = 24  # of a logit, read and written in both passes
KEPT_LOGIT_BYTES = 4
LAUNCHES = 150  # of a block's both passes
UPDATE_BYTES = 30  # of a parameter: gradient, master weight and moments read, all but the gradient written
SMALL = 0.02  # of a block's time, to compute one of its small modules again
SUM_BYTES = 10  # of a parameter in each micro batch: its gradient is added in fp32


@dataclass(frozen=True)
class Sizes:
    """What all layouts of a model share.

    kinds: of MoE layers, each with the mean number of a token's experts. routed: FLOPs of a token in its
    routed experts of all layers. vocabulary: padded. blocks, after: FLOPs, see `block_flops`.
    """

    size: ModelSize
    flops: ModelFlops
    kinds: tuple[tuple[LayerKind, float], ...]
    routed: float
    vocabulary: int
    blocks: tuple[float, ...]
    after: float

    @classmethod
    def of(cls, config: RunConfig) -> "Sizes":
        """Return those of a model whose vocabulary is set."""
        vocab_size = config.model.vocab_size
        if vocab_size is None:
            raise UserError("model.vocab_size: not set; --search needs it")
        padded = padded_vocab_size(vocab_size, config.model.vocab_multiple)
        sizes = [(kind, mean_choices(kind.moe)) for kind in kinds(config) if kind.layers]
        blocks, after = block_flops(config, vocab_size)
        flops = model_flops(config, vocab_size)
        pairs = {number: choices for kind, choices in sizes for number in kind.layers}
        routed = sum(chosen * flops.by_layer.get(number, flops.pair) for number, chosen in pairs.items())
        return cls(model_size(config, vocab_size), flops, tuple(sizes), routed, padded, tuple(blocks), after)


@dataclass(frozen=True)
class Estimate:
    """The time and memory of a step of one rank. bytes: the most that it holds at a time. samples: of the
    step's global batch.
    """

    seconds: float
    bytes: float
    samples: int


def _share_of(size: ModelSize, share: float) -> ModelSize:
    """Return a share of all parameters."""
    numbers: dict[str, Any] = {
        name: round(share * number) for name, number in vars(size).items() if name != "matrices"
    }
    experts, sharded, others = (round(share * number) for number in size.matrices)
    return ModelSize(**numbers, matrices=(experts, sharded, others))


def estimate(
    config: RunConfig, plan: ParallelPlan, sizes: Sizes, gpu: Gpu, gpus_per_node: int, load: float
) -> Estimate:
    """Return the estimated time and memory of a legal layout; load: as of `simulate_step`."""
    layout, parallel = plan.layout, config.parallel
    schedule = BatchSchedule.from_config(config.train, layout.data)
    micro_batches = schedule.final // schedule.unit
    share, slowest = _largest_stage(sizes.blocks, sizes.after, layout.pipeline, parallel.pipeline_chunks)
    size = sizes.size if share == 1 else _share_of(sizes.size, share)
    dense, experts = size.on_rank(layout.tensor, layout.expert_ranks)
    memory = gpu.memory * ASSUMED.bytes
    each = slowest * _micro_batch(config, plan, sizes, gpu, gpus_per_node, load)
    each += SUM_BYTES * (dense + experts) / memory
    once = 0.0
    shares = (dense, layout.replicas, layout.tensor), (experts, layout.expert_copies, layout.expert_ranks)
    for parameters, copies, stride in shares:
        part = parameters * (copies - 1) / copies
        ring = part / _bandwidth(copies, stride, gpu, gpus_per_node, ring=True)
        once += UPDATE_BYTES * parameters / (copies if plan.stage else 1) / memory
        if plan.stage == 3:  # gathered in both passes, and once more where a block is computed again
            each += ring * (2 * (3 if "block" in recomputed_modules(config.model) else 2) + 2)
        elif plan.stage == 2:
            each += ring * 2
            once += ring * 2
        else:  # reduced once in fp32; not scattered with tensor parallelism, nor at ZeRO 0
            once += ring * (6 if plan.stage and layout.tensor == 1 else 10)
    idle = (layout.pipeline - 1) / parallel.pipeline_chunks  # micro batches
    held = states_of(config, plan, size).total + activation_bytes(config, 0, plan)
    tokens = config.train.micro_batch_size * config.data.sequence_length / layout.batch_ranks
    held += KEPT_LOGIT_BYTES * tokens * sizes.vocabulary
    return Estimate((micro_batches + idle) * each + once, held, schedule.final)


@cache
def _largest_stage(blocks: tuple[float, ...], after: float, stages: int, chunks: int) -> tuple[float, float]:
    """Return the shares of the blocks of the largest stage, and of the FLOPs of the slowest one."""
    if stages == 1:
        return 1.0, 1.0
    counts = blocks_of_parts(list(blocks), after, stages, chunks)
    ends = list(accumulate(counts, initial=0))
    loads = [sum(blocks[start:end]) for start, end in pairwise(ends)]
    loads[-1] += after
    most = max(sum(counts[stage::stages]) for stage in range(stages))
    return most / len(blocks), max(sum(loads[stage::stages]) for stage in range(stages)) / sum(loads)


def _micro_batch(
    config: RunConfig, plan: ParallelPlan, sizes: Sizes, gpu: Gpu, gpus_per_node: int, load: float
) -> float:
    """Return seconds of both passes of all blocks, with what is computed again."""
    model, tokens = config.model, config.train.micro_batch_size * config.data.sequence_length
    layout = plan.layout
    own = tokens / layout.batch_ranks
    blocks = num_blocks(config)
    modules = recomputed_modules(model)
    again = (4 if modules & {"block", "moe_layer", "moe"} else 3) / 3
    resent = (4 if modules & {"block", "moe_layer"} else 3) / 3
    rest = (
        4 / 3 if "block" in modules else 1.0 + SMALL * len(modules & {"norms", "latent_up", "shared_experts"})
    )
    weights = [size(kind.config) for kind, _ in sizes.kinds for size in (expert_hidden_size, expert_ffn_size)]
    grouped = ASSUMED.of("grouped", min(weights, default=0))
    seconds = own * sizes.flops.token * rest / (gpu.bf16 * ASSUMED.of("matmul", model.hidden_size))
    seconds += own * load * sizes.routed * again / (gpu.bf16 * grouped)
    whole = replace(config, model=replace(model, recompute="none"), train=replace(config.train, in_flight=1))
    passed = PASSES * again * activation_bytes(whole, 0, plan) + LOGIT_BYTES * own * sizes.vocabulary
    seconds += passed / (gpu.memory * ASSUMED.bytes)
    launches = LAUNCHES * rest * blocks
    seconds = max(seconds + launches * ASSUMED.kernel_s, launches * ASSUMED.aten_call_s)
    if layout.tensor > 1:
        pair = cut_pair_traffic(
            layout, sequence=config.parallel.sequence, tokens=tokens, hidden_size=model.hidden_size, width=2
        )
        pairs = 2 * blocks - len(moe_block_numbers(config))
        seconds += rest * pairs * (pair / (gpu.nvlink * ASSUMED.link) + 4 * ASSUMED.collective_s)
    for kind, choices in sizes.kinds if layout.expert_ranks > 1 or layout.tensor > 1 else ():
        traffic = moe_traffic(
            layout,
            sequence=config.parallel.sequence,
            tokens=tokens,
            pairs=tokens * choices * load,
            hidden_size=model.hidden_size,
            num_experts=kind.moe.num_experts,
            width=2,
            row_size=expert_hidden_size(kind.config),
            nodes_of_token=mean_nodes(kind.moe, layout.nodes, choices),
            fp8=config.parallel.exchange_dtype == "fp8",
        )
        inside = layout.expert // layout.nodes  # a node, if rows are exchanged by node
        rows = traffic.rows / _bandwidth(inside, layout.expert_tensor, gpu, gpus_per_node, ring=False)
        between = traffic.between / (gpu.network * ASSUMED.network)
        if config.train.in_flight == 2:  # it travels beside what the other micro batch computes
            seconds -= min(seconds, len(kind.layers) * (between if layout.nodes > 1 else rows))
        rows += between + traffic.pairs / (gpu.network * ASSUMED.network)
        slices = traffic.slices / _bandwidth(layout.expert_tensor, 1, gpu, gpus_per_node, ring=False)
        beside = (traffic.tokens + traffic.scores) / (gpu.nvlink * ASSUMED.link)
        each = rows + slices + beside + 6 * ASSUMED.collective_s + ASSUMED.sync_s
        seconds += resent * len(kind.layers) * each
    if layout.context > 1:
        heads = {"query_size": query_size(model), "key_size": key_size(model)}
        exchanged = context_traffic(layout, tokens=tokens, width=2, **heads)
        links = _bandwidth(layout.context, layout.tensor, gpu, gpus_per_node, ring=False)
        seconds += rest * blocks * (exchanged / links + 8 * ASSUMED.collective_s)
    return seconds


def _bandwidth(ranks: int, stride: int, gpu: Gpu, gpus_per_node: int, *, ring: bool) -> float:
    """Return bytes/s at which a rank sends to its group, as `hardware.Topology` has it."""
    here = min(ranks, max(1, gpus_per_node // stride))
    if here == ranks:
        return gpu.nvlink * ASSUMED.link
    away = 1 / here if ring else (ranks - here) / (ranks - 1)
    inside, between = (1 - away) / (gpu.nvlink * ASSUMED.link), away / (gpu.network * ASSUMED.network)
    return 1 / max(inside, between)
