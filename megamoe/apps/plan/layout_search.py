"""Ranks layouts that fit on a cluster: formulas order all legal ones, and the first are simulated."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from megamoe.apps.plan.fake_cuda import fake_torch_cuda
from megamoe.apps.plan.layout_estimate import Estimate, Sizes, estimate
from megamoe.apps.plan.plan import RESERVED, Cluster, Plan, make_plan, with_node_size
from megamoe.apps.plan.plan_page import GB, record
from megamoe.apps.plan.stand_ins import without_data
from megamoe.config import RunConfig
from megamoe.config.layer_kinds import experts_by_layer, kinds
from megamoe.config.shapes import moe_layer_numbers
from megamoe.errors import Problem, UserError
from megamoe.optim.schedule import BatchSchedule
from megamoe.parallel.layout import divisors
from megamoe.parallel.zero.deepspeed_config import (
    ParallelPlan,
    read_deepspeed_config,
    read_offload,
    resolve_precision,
)
from megamoe.validation.pipeline import pipeline_problems
from megamoe.validation.run import section_problems

ZERO_FILES = {
    "bf16": ("zero1_bf16_cuda", "zero2_bf16_cuda", "zero3_bf16_cuda", "zero2_bf16_offload_cuda"),
    "fp16": ("zero1_fp16", "zero2_fp16", "zero3_fp16"),
    "fp32": ("zero1_fp32", "zero2_fp32", "zero3_fp32"),
}
SLICES = (1, 2, 4, 8)  # of an expert, and micro batches
SIMULATED = 8  # layouts, unless the user says how many
CHUNKS = (1, 2, 4, 8)  # of a pipeline stage
CONTEXT = (1, 2, 4)  # parts of a sequence
MOST_STAGES = 32
ALWAYS_SHOWN = ("tensor", "sequence", "expert", "expert_tensor", "deepspeed")  # keys of a layout
NEAR = 1.3  # times the usable memory: larger estimates are not simulated


@dataclass(frozen=True)
class Candidate:
    """A legal layout, and what the formulas say of it."""

    config: RunConfig
    estimate: Estimate

    @property
    def offloads(self) -> bool:
        """Whether the optimiser's states are on the host, whose update and copies take no time in a plan."""
        return read_offload(_content(self.config.parallel.deepspeed)).optimizer != "none"

    @property
    def overrides(self) -> list[str]:
        """What to add to the command line of training."""
        parallel, recompute = self.config.parallel, self.config.model.recompute
        keys = ["pipeline"] if parallel.pipeline * parallel.context > 1 else []
        keys += [key for key in ("pipeline_chunks", "context") if getattr(parallel, key) > 1]
        values = {key: getattr(parallel, key) for key in (*keys, *ALWAYS_SHOWN)}
        values["sequence"] = str(parallel.sequence).lower()
        shown = recompute if isinstance(recompute, str) else f"[{','.join(recompute)}]"
        return [
            *(f"parallel.{key}={value}" for key, value in values.items()),
            f"model.recompute={shown}",
            f"train.micro_batch_size={self.config.train.micro_batch_size}",
        ]

    def needs_as_much(self, other: "Candidate") -> bool:
        """Whether it has another's layout, no smaller micro batch, and no more recomputation."""
        same = self.config.parallel == other.config.parallel
        smaller = other.config.train.micro_batch_size <= self.config.train.micro_batch_size
        order = recomputations(self.config)
        mine, its = (order.index(each.config.model.recompute) for each in (self, other))  # type: ignore[arg-type]
        return same and smaller and its >= mine


@dataclass(frozen=True)
class SearchResult:
    """What a search did.

    considered: layouts, of which `illegal` training would refuse, and `too_large` are far too large by the
    formulas. plans: of those simulated, the fastest first, and behind them those that do not fit. refused:
    what the simulation cannot do, and why. skipped: need as much memory as another one that does not fit.
    """

    considered: int
    illegal: int
    too_large: int
    skipped: int
    plans: list[tuple[Candidate, Plan]]
    refused: list[tuple[Candidate, str]]


def search(
    config: RunConfig, cluster: Cluster, load: float = 1.0, simulated: int = SIMULATED, whole: bool = False
) -> SearchResult:
    """Rank layouts by the simulated tokens a second. The global batch is that of `config`; if it is not set,
    that of each layout.

    simulated: how many layouts, those that are the fastest by formulas. load, whole: see `make_plan`.
    `cuda_device.load` comes first.

    Raises:
        UserError: if no layout is legal, and near the memory of the device by the formulas; if none can be
            simulated.
    """
    config = with_node_size(config, cluster)
    sizes = Sizes.of(without_data(config)[0])
    considered = list(variants(config, cluster))
    legal = legal_ones(considered, cluster.ranks)
    usable = cluster.gpu.capacity * (1 - RESERVED)
    of_cluster = sizes, cluster.gpu, cluster.gpus_per_node, load
    known = [
        Candidate(each, estimate(each, _parallel_plan(each, cluster.ranks), *of_cluster)) for each in legal
    ]
    near = ordered(known, usable)
    if not near:
        least = min((each.estimate.bytes for each in known), default=0.0)
        reason = (
            f"the smallest needs about {least / GB:,.3g} GB of {usable / GB:.3g} GB"
            if known
            else "none is legal"
        )
        raise UserError(f"--search: none of {len(considered)} layouts can fit: {reason}; take more nodes")
    plans: list[tuple[Candidate, Plan]] = []
    refused: list[tuple[Candidate, str]] = []
    skipped = 0
    for candidate in near:
        if len(plans) == simulated:
            break
        if any(not plan.fits and candidate.needs_as_much(other) for other, plan in plans):
            skipped += 1
            continue
        try:
            plans.append((candidate, make_plan(candidate.config, cluster, load, whole)))
        except UserError as error:
            refused.append((candidate, str(error)))
    if not plans:
        first, reason = refused[0]
        found = f"none of {len(refused)} layouts can be simulated"
        raise UserError(f"--search: {found}; {' '.join(first.overrides)}: {reason}")

    def order(found: tuple[Candidate, Plan]) -> tuple[bool, bool, float, list[str]]:
        candidate, plan = found
        return not plan.fits, candidate.offloads, -plan.tokens_per_second, candidate.overrides

    counts = len(considered), len(considered) - len(legal), len(known) - len(near), skipped
    return SearchResult(*counts, sorted(plans, key=order), refused)


def variants(config: RunConfig, cluster: Cluster) -> Iterator[RunConfig]:
    """Yield layouts, legal or not; they share the sections that do not differ."""
    moe, train, model = bool(moe_layer_numbers(config)), config.train, config.model
    precision = resolve_precision(config, _content(config.parallel.deepspeed))
    files = [f"ds_configs/{name}.json" for name in ZERO_FILES[precision]]
    there: list[str | None] = [each for each in files if Path(each).is_file()]
    own = config.parallel.deepspeed
    chosen = [own, *(each for each in there if each != own)]
    tensors = divisors(cluster.gpus_per_node)
    experts = divisors(math.gcd(*experts_by_layer(config))) if moe else [1]
    models = [replace(model, recompute=each) for each in recomputations(config)]  # type: ignore[arg-type]
    trains = [replace(train, micro_batch_size=micro) for micro in SLICES]
    for tensor, expert, cut in product(tensors, experts, SLICES if moe else [1]):
        for stages, chunks, context in _stagings(config, cluster):
            staged = stages * context > 1
            if expert * cut > cluster.ranks // stages or tensor * context > cluster.gpus_per_node:
                continue
            if staged and cut > 2:
                continue  # more slices of an expert send all rows several times
            sequences = [tensor > 1] if staged else [False, True] if tensor > 1 else [False]
            for file, sequence in product([chosen[0]] if staged else chosen, sequences):
                parallel = replace(
                    config.parallel,
                    pipeline=stages,
                    pipeline_chunks=chunks,
                    blocks_per_stage=None,
                    context=context,
                    tensor=tensor,
                    sequence=sequence,
                    expert=expert,
                    expert_tensor=cut,
                    deepspeed=file,
                )
                for of_model, of_train in product(models, trains[:1] if context > 1 else trains):
                    yield replace(config, parallel=parallel, model=of_model, train=of_train)


def recomputations(config: RunConfig) -> list[str | list[str]]:
    """Return what is tried for `model.recompute`; each needs less memory than the one before."""
    moe, model = bool(moe_layer_numbers(config)), config.model
    few = ["norms", *(["latent_up"] if model.latent is not None else [])]
    if moe and any(kind.moe.num_shared_experts for kind in kinds(config)):
        few.append("shared_experts")
    with_experts: list[str | list[str]] = [[*few, "moe"], "selective"] if moe else []
    return ["none", few, *with_experts, "full"]


def _stagings(config: RunConfig, cluster: Cluster) -> Iterator[tuple[int, int, int]]:
    """Yield (stages, chunks, parts of a sequence); a decoder alone has more than one of them."""
    yield 1, 1, 1
    if config.model.architecture != "decoder":
        return
    for stages, chunks, context in product(divisors(cluster.ranks), CHUNKS, CONTEXT):
        is_staged = stages > 1 or chunks == 1
        fits = stages <= MOST_STAGES and stages * chunks <= config.model.num_layers
        if stages * context > 1 and is_staged and fits:
            yield stages, chunks, context


def legal_ones(configs: list[RunConfig], ranks: int) -> list[RunConfig]:
    """Return those that training would not refuse. Recomputation and the ZeRO file make no difference."""
    verdicts: dict[tuple[Any, ...], bool] = {}
    found = []
    with fake_torch_cuda():
        for config in configs:
            parallel = config.parallel
            sizes = parallel.tensor, parallel.sequence, parallel.expert, parallel.expert_tensor
            staging = parallel.pipeline, parallel.pipeline_chunks, parallel.context
            key = *sizes, *staging, config.train.micro_batch_size
            if key not in verdicts:
                verdicts[key] = not any(_problems(config, ranks))
            if verdicts[key]:
                found.append(config)
    return found


def _problems(config: RunConfig, ranks: int) -> Iterator[Problem]:
    plan = _parallel_plan(config, ranks)
    sections = list(section_problems(config, ranks, plan.precision))
    yield from sections
    if not sections and plan.layout.pipeline * plan.layout.context > 1:
        yield from pipeline_problems(config, plan, BatchSchedule.from_config(config.train, plan.layout.data))


def ordered(candidates: list[Candidate], usable: float) -> list[Candidate]:
    """Return those that may fit, the fastest first, and then those that offload; behind them, by size, those
    that hardly will.
    """
    near = [each for each in candidates if each.estimate.bytes <= NEAR * usable]

    def key(candidate: Candidate) -> tuple[bool, bool, float, list[str]]:
        large = candidate.estimate.bytes > usable
        by_time = candidate.estimate.seconds / candidate.estimate.samples  # their batches may differ
        first = candidate.estimate.bytes if large else by_time
        return large, candidate.offloads and not large, first, candidate.overrides

    return sorted(near, key=key)


def _parallel_plan(config: RunConfig, ranks: int) -> ParallelPlan:
    return ParallelPlan.of(config, ranks, _content(config.parallel.deepspeed))


@cache
def _content(path: str | None) -> dict[str, Any]:
    return read_deepspeed_config(path)


def table(found: SearchResult) -> str:
    """Return the page of `tools/plan.py --search`."""
    lines = [
        f"{found.considered:,} layouts considered: {found.illegal:,} that training would refuse, "
        f"{found.too_large:,} far too large by formulas",
        f"{len(found.plans)} simulated, the fastest by formulas; {found.skipped} skipped, which need as much "
        "memory as another that does not fit",
        f"{'ms a step':>12} {'batch':>7} {'tokens/s':>12} {'MFU':>6} {'peak GB':>8}  layout",
    ]
    for candidate, plan in found.plans:
        missing = (plan.peak_bytes - plan.usable_bytes) / GB
        lines.append(
            f"{plan.step_seconds * 1e3:12,.1f} {candidate.estimate.samples:7,} "
            f"{plan.tokens_per_second:12,.0f} {plan.utilisation:6.1%} {plan.peak_bytes / GB:8.1f}  "
            + " ".join(candidate.overrides)
            + ("" if plan.fits else f"  DOES NOT FIT: {missing:.1f} GB too much")
        )
    lines += [f"not simulated: {' '.join(each.overrides)}: {reason}" for each, reason in found.refused[:3]]
    if len(found.refused) > 3:
        lines.append(f"not simulated: {len(found.refused) - 3} more")
    if any(each.config.train.global_batch_size is None for each, _ in found.plans):
        lines.append(
            "train.global_batch_size is not set: a layout's batch is its micro batch times its data-parallel "
            "ranks; ranked by tokens/s"
        )
    return "\n".join(lines)


def search_record(found: SearchResult) -> dict[str, Any]:
    """Return a search for JSON; each layout has its overrides, the formulas' figures and its plan."""
    return {
        **{name: getattr(found, name) for name in ("considered", "illegal", "too_large", "skipped")},
        "refused": [{"overrides": each.overrides, "reason": reason} for each, reason in found.refused],
        "layouts": [
            {
                "overrides": candidate.overrides,
                "global_batch_size": candidate.estimate.samples,
                "estimated_step_seconds": candidate.estimate.seconds,
                "estimated_peak_bytes": candidate.estimate.bytes,
                "plan": record(plan),
            }
            for candidate, plan in found.plans
        ],
    }
