"""The time of a counted step on a GPU by the roofline model, by part and by what bounds it."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from megamoe.apps.plan.assumptions import ASSUMED, Assumptions
from megamoe.apps.plan.counter import (
    COMBINE,
    DISPATCH,
    SHARED_EXPERTS,
    STAGES,
    WEIGHT_GRADIENTS,
    CollectiveKey,
    CollectiveTotal,
    OperatorKey,
    OperatorTotal,
)
from megamoe.apps.plan.hardware import RANKS_OF_A_NODE, Gpu, Topology
from megamoe.apps.plan.rank import StepCosts

BOUNDS = ("flops", "bytes", "link", "launch", "sync")
GROUPED = ("aten::_grouped_mm", "megamoe::grouped", "megamoe::experts")  # the beginnings of their names
SCATTERED = {"aten::index_add", "aten::index_add_", "aten::scatter_add_", "aten::scatter_add"}
SCATTERED |= {"aten::index_put_", "aten::index_copy_", "aten::index_copy", "aten::embedding_dense_backward"}


@dataclass
class PartTime:
    """Seconds of one part of the step by what bounds them, and what it launches."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BOUNDS, 0.0))
    launches: int = 0
    flops: int = 0

    @property
    def total(self) -> float:
        """Seconds in all."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Roofline:
    """A step's time by part, in seconds, and its model FLOPs.

    seconds: everything one after the other, without what `hidden_exchange` tells. hidden: of these, the
    other collectives that the code launches beside the backward pass, as far as the pass lasts so long.
    """

    parts: dict[str, PartTime]
    seconds: float
    model_flops: float
    hidden: float


CollectiveSeconds = Callable[[CollectiveKey, CollectiveTotal, Gpu, Assumptions], float]


def roofline(
    costs: StepCosts, gpu: Gpu, assumed: Assumptions = ASSUMED, seconds_of: CollectiveSeconds | None = None
) -> Roofline:
    """Return the time of one step: operators one after the other, each bound by its FLOPs or its bytes.

    What pipeline stages send each other takes no time of theirs, see `Pipeline`.

    seconds_of: the time of collectives; default: on nodes of RANKS_OF_A_NODE.
    """
    seconds_of = seconds_of or Topology(RANKS_OF_A_NODE).seconds
    parts: dict[str, PartTime] = defaultdict(PartTime)
    for key, total in costs.counts.operators.items():
        part = parts[key.part]
        part.launches += total.launches
        part.flops += total.flops
        work, bound = operator_seconds(key, total, gpu, assumed)
        part.seconds[bound] += work
        part.seconds["launch"] += total.launches * assumed.kernel_s
    for group, traffic in costs.counts.collectives.items():
        if group.part == STAGES:
            continue
        parts[group.part].seconds["link"] += seconds_of(group, traffic, gpu, assumed)
        parts[group.part].launches += traffic.calls
    for (_, name), saved in hidden_exchange(costs, gpu, assumed, seconds_of).items():
        parts[name].seconds["link"] -= saved
    for name, waits in (costs.counts.syncs + costs.counts.uploads).items():
        parts[name].seconds["sync"] += waits * assumed.sync_s
    for name, idle in _behind_the_host(costs, gpu, assumed, seconds_of).items():
        parts[name].seconds["launch"] += idle
    seconds = sum(part.total for part in parts.values())
    hidden = assumed.hidden * min(beside_seconds(costs, gpu, assumed, seconds_of))
    return Roofline(dict(parts), seconds, model_flops(costs), hidden)


def hidden_exchange(
    costs: StepCosts, gpu: Gpu, assumed: Assumptions, seconds_of: CollectiveSeconds
) -> dict[tuple[str, str], float]:
    """Seconds of the experts' exchange that other work hides, by (phase, part).

    In the forward pass rows travel to the experts beside the shared experts; in the backward pass their
    gradients travel beside the backward pass of these and the experts' weight gradients. With two micro
    batches in flight (`train.in_flight`) the exchange of one, both ways, also travels beside the rest of the
    other's pass: together they last as long as the longer one. What a block that is computed again exchanges
    travels beside shared experts only. It is assumed that neither slows the other down.
    """
    traffic, found = costs.counts.collectives, {}
    for phase in ("forward", "backward"):
        seconds: dict[str, float] = defaultdict(float)
        for key, total in costs.counts.operators.items():
            if key.phase == phase:
                seconds[key.part] += operator_seconds(key, total, gpu, assumed)[0]
        travel = {part: 0.0 for part in (DISPATCH, COMBINE)}
        for each, sent in traffic.items():
            # Rows, not counts or pairs, for which the host or the pass waits at once.
            are_rows = each.part == COMBINE or (each.part == DISPATCH and each.is_async)
            if each.phase == phase and each.ranks == costs.travel_ranks and are_rows:
                travel[each.part] += seconds_of(each, sent, gpu, assumed)
        own = min(seconds[SHARED_EXPERTS] + seconds[WEIGHT_GRADIENTS], travel[DISPATCH])
        found[phase, DISPATCH] = own
        if costs.in_flight == 2:
            share = 0.5 if phase == "backward" and costs.exchanges_again else 1.0
            left = {DISPATCH: max(0.0, share * travel[DISPATCH] - own), COMBINE: share * travel[COMBINE]}
            total_left = sum(left.values())
            covered = min(total_left, sum(seconds.values()) - own) / total_left if total_left else 0.0
            found[phase, DISPATCH] += covered * left[DISPATCH]
            found[phase, COMBINE] = covered * left[COMBINE]
    return found


def beside_seconds(
    costs: StepCosts, gpu: Gpu, assumed: Assumptions, seconds_of: CollectiveSeconds
) -> tuple[float, float]:
    """Seconds of the backward pass, and of the collectives that run beside it.

    These are the ones that the code launches there and waits for at its end. It is assumed that they can
    begin when the first part of the pass is done, of the vocabulary.
    """
    backward = [(key, total) for key, total in costs.counts.operators.items() if key.phase == "backward"]
    traffic = costs.counts.collectives
    beside = [key for key in traffic if key.phase == "backward" and key.is_async and key.part != DISPATCH]
    times = {key: operator_seconds(key, total, gpu, assumed)[0] for key, total in backward}
    passed = sum(time for key, time in times.items() if key.part != "vocabulary and loss")
    return passed, sum(seconds_of(key, traffic[key], gpu, assumed) for key in beside)


def operator_seconds(
    key: OperatorKey, total: OperatorTotal, gpu: Gpu, assumed: Assumptions
) -> tuple[float, str]:
    """Seconds of all calls on the device, without gaps, and what bounds them."""
    by_flops = total.flops / (gpu.peak(key.dtype) * _share(key, assumed))
    reached = assumed.scattered_bytes if key.name in SCATTERED else assumed.bytes
    by_bytes = total.bytes / (gpu.memory * reached)
    return (by_flops, "flops") if by_flops > by_bytes else (by_bytes, "bytes")


def _share(key: OperatorKey, assumed: Assumptions) -> float:
    """Return the share of the peak FLOP/s that an operator reaches, by the sizes of its first tensors."""
    if key.name.startswith(GROUPED):
        return assumed.of("grouped", _smallest(key))
    if "attention" in key.name:
        return assumed.of("attention", key.shape[0][-1] if key.shape and key.shape[0] else 0, key.phase)
    return assumed.of("matmul", _smallest(key))


def _smallest(key: OperatorKey) -> int:
    """Return the smallest dimension of the matrices of a product, whose stacks may have more."""
    return min((size for shape in key.shape for size in shape[-2:] if len(shape) > 1), default=0)


def host_seconds(costs: StepCosts, assumed: Assumptions) -> float:
    """The host's time of all launches of a step."""
    return sum(_of_host(costs, assumed).values())


def _of_host(costs: StepCosts, assumed: Assumptions) -> dict[tuple[str, str], float]:
    """The host's time of launches by (phase, part)."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for key, total in costs.counts.operators.items():
        own = key.name.startswith("megamoe::")
        found[key.phase, key.part] += total.calls * (assumed.own_call_s if own else assumed.aten_call_s)
    for group, traffic in costs.counts.collectives.items():
        found[group.phase, group.part] += traffic.calls * assumed.collective_call_s
    return found


def _behind_the_host(
    costs: StepCosts, gpu: Gpu, assumed: Assumptions, seconds_of: CollectiveSeconds
) -> dict[str, float]:
    """Seconds by part in which the device waits for the host's launches.

    In each phase the host runs ahead of the device, or the device waits for it. What the host does longer is
    booked on the parts in the ratio of the host's time for them.
    """
    found: dict[str, float] = defaultdict(float)
    host: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    device: dict[str, float] = defaultdict(float)
    for (phase, part), seconds in _of_host(costs, assumed).items():
        host[phase][part] += seconds
    for key, total in costs.counts.operators.items():
        device[key.phase] += operator_seconds(key, total, gpu, assumed)[0] + total.launches * assumed.kernel_s
    for group, traffic in costs.counts.collectives.items():
        if not group.is_async and group.part != STAGES:
            device[group.phase] += seconds_of(group, traffic, gpu, assumed)
    for phase, parts in host.items():
        whole = sum(parts.values())
        for part, seconds in parts.items():
            found[part] += max(0.0, whole - device[phase]) * seconds / whole
    return found


def model_flops(costs: StepCosts) -> float:
    """What the model's step needs on this rank under a balanced load: 3 x the forward products."""
    forward = [(key, total) for key, total in costs.counts.operators.items() if key.phase == "forward"]
    return 3 * sum(total.flops / (costs.load if key.part == "experts" else 1.0) for key, total in forward)
