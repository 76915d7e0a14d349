"""The time of a counted step on a GPU by the roofline model, by part."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megamoe.apps.plan.assumptions import ASSUMED, Assumptions
from megamoe.apps.plan.counter import (
    COMBINE,
    DISPATCH,
    SHARED_EXPERTS,
    STAGES,
    WEIGHT_GRADIENTS,
    CollectiveKey,
    CollectiveTotal,
    Counts,
    OperatorKey,
    OperatorTotal,
)
from megamoe.apps.plan.hardware import RANKS_OF_A_NODE, Gpu, Topology
from megamoe.apps.plan.rank import StepCosts

WAITING = "device waits for the host"  # the part of the step in which nothing runs
GROUPED = ("aten::_grouped_mm", "megamoe::grouped", "megamoe::experts")  # the beginnings of their names
SCATTERED = {"aten::index_add", "aten::index_add_", "aten::scatter_add_", "aten::scatter_add"}
SCATTERED |= {"aten::index_put_", "aten::index_copy_", "aten::index_copy", "aten::embedding_dense_backward"}


@dataclass(frozen=True)
class Roofline:
    """A step's time by part, in seconds, and its model FLOPs.

    seconds: everything one after the other, without what `hidden_exchange` tells. hidden: of these, the
    other collectives that the code launches beside the backward pass, as far as the pass lasts so long.
    """

    parts: dict[str, float]
    seconds: float
    model_flops: float
    hidden: float


CollectiveSeconds = Callable[[CollectiveKey, CollectiveTotal, Gpu, Assumptions], float]


def roofline(
    costs: StepCosts, gpu: Gpu, assumed: Assumptions = ASSUMED, seconds_of: CollectiveSeconds | None = None
) -> Roofline:
    """Return the time of one step among many: operators one after the other, by their FLOPs or their bytes.

    In the part WAITING the device has nothing to do, see `idle_seconds`. What pipeline stages send each other
    takes no time of theirs, see `Pipeline`.

    seconds_of: the time of collectives; default: on nodes of RANKS_OF_A_NODE.
    """
    seconds_of = seconds_of or Topology(RANKS_OF_A_NODE).seconds
    kernel_s = assumed.kernel_s
    parts: dict[str, float] = defaultdict(float)
    device: dict[OperatorKey | CollectiveKey, float] = {}  # of one call, in the stream of the passes
    for key, total in costs.counts.operators.items():
        seconds = operator_seconds(key, total, gpu, assumed) + total.launches * kernel_s
        device[key] = seconds / total.calls
        parts[key.part] += seconds
    for group, traffic in costs.counts.collectives.items():
        if group.part == STAGES:
            continue
        seconds = seconds_of(group, traffic, gpu, assumed)
        if not group.is_async or group.part == DISPATCH:
            device[group] = seconds / traffic.calls
        parts[group.part] += seconds
    for (_, name), saved in hidden_exchange(costs, gpu, assumed, seconds_of).items():
        parts[name] -= saved
    parts[WAITING] = idle_seconds(costs.counts, device, assumed)
    hidden = assumed.hidden * min(beside_seconds(costs, gpu, assumed, seconds_of))
    return Roofline(dict(parts), sum(parts.values()), model_flops(costs), hidden)


def idle_seconds(
    counts: Counts, device: Mapping[OperatorKey | CollectiveKey, float], assumed: Assumptions
) -> float:
    """Return the seconds of a step in which the device waits for the host, on two clocks.

    The host makes the calls in their order, one after the other. The device begins one when the host has made
    it and the calls before are done. Where the host reads from the device, it waits until these are done. It
    may have made calls of the next step while the device still works on this one, so the second of two steps
    counts.

    device: seconds of one call; calls that are not in it run beside the others.
    """
    host, wait_s = call_seconds(counts, assumed), assumed.sync_s
    host_s = device_s = idle = 0.0
    for _ in range(2):
        idle = 0.0
        for key in counts.order:
            if key is None:
                host_s = max(host_s, device_s) + wait_s
                continue
            host_s += host[key]
            if key in device:
                idle += max(0.0, host_s - device_s)
                device_s = max(host_s, device_s) + device[key]
    return idle


def call_seconds(counts: Counts, assumed: Assumptions) -> dict[OperatorKey | CollectiveKey, float]:
    """Return the host's time of one call of each kind."""
    ours, aten, collective = assumed.own_call_s, assumed.aten_call_s, assumed.collective_call_s
    return {
        **{key: ours if key.name.startswith("megamoe::") else aten for key in counts.operators},
        **dict.fromkeys(counts.collectives, collective),
    }


def host_seconds(counts: Counts, assumed: Assumptions) -> float:
    """Return the host's time of all calls."""
    host = call_seconds(counts, assumed)
    return sum(host[key] for key in counts.order if key is not None)


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
                seconds[key.part] += operator_seconds(key, total, gpu, assumed)
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
    times = {key: operator_seconds(key, total, gpu, assumed) for key, total in backward}
    passed = sum(time for key, time in times.items() if key.part != "vocabulary and loss")
    return passed, sum(seconds_of(key, traffic[key], gpu, assumed) for key in beside)


def operator_seconds(key: OperatorKey, total: OperatorTotal, gpu: Gpu, assumed: Assumptions) -> float:
    """Seconds of all calls on the device, without gaps, by their FLOPs or their bytes."""
    by_flops = total.flops / (gpu.peak(key.dtype) * _share(key, assumed))
    reached = assumed.scattered_bytes if key.name in SCATTERED else assumed.bytes
    by_bytes = total.bytes / (gpu.memory * reached)
    return max(by_flops, by_bytes)


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


def model_flops(costs: StepCosts) -> float:
    """What the model's step needs on this rank under a balanced load: 3 x the forward products."""
    forward = [(key, total) for key, total in costs.counts.operators.items() if key.phase == "forward"]
    return 3 * sum(total.flops / (costs.load if key.part == "experts" else 1.0) for key, total in forward)
