"""The figures of a simulated step that are sums over blocks and micro batches, and so can be extrapolated."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from megamoe.simulation.counter import CollectiveKey
from megamoe.simulation.hardware import ASSUMED, Gpu
from megamoe.simulation.links import Topology
from megamoe.simulation.memory import GRADIENTS, OPTIMIZER, PARAMETERS
from megamoe.simulation.rank import StepCosts
from megamoe.simulation.roofline import beside_seconds, roofline


@dataclass(frozen=True)
class Figures:
    """Numbers by name, in each mapping for one step of one rank.

    numbers: `parameters`, `tokens`, `model_flops`, `flops`, `kernels`, `waits`, `passed` and `beside` (in
    seconds, see `roofline.beside_seconds`). states: bytes by category, gradients as the backward pass
    leaves them. seconds: by part. calls, bytes: of collectives. peaks: by (phase, category), bytes when it
    holds most. kept: activations at the peak by (phase, part).
    """

    numbers: Mapping[str, float]
    states: Mapping[str, float]
    seconds: Mapping[str, float]
    calls: Mapping[CollectiveKey, float]
    bytes: Mapping[CollectiveKey, float]
    peaks: Mapping[tuple[str, str], float]
    kept: Mapping[tuple[str, str], float]

    @property
    def step_seconds(self) -> float:
        """Everything one after the other."""
        return sum(self.seconds.values())

    @property
    def overlapped_seconds(self) -> float:
        """Without the collectives that run beside the backward pass."""
        return self.step_seconds - min(self.numbers["passed"], self.numbers["beside"])

    def phase_peaks(self) -> dict[str, float]:
        """Return the most bytes that each phase holds at one time."""
        found: dict[str, float] = defaultdict(float)
        for (phase, _), size in self.peaks.items():
            found[phase] += size
        return dict(found)

    @property
    def peak_phase(self) -> str:
        """The phase that holds most."""
        peaks = self.phase_peaks()
        return max(peaks, key=peaks.__getitem__)


def figures_of(costs: StepCosts, gpu: Gpu, topology: Topology) -> Figures:
    """Return the figures of a step that was simulated whole."""
    times = roofline(costs, gpu, seconds_of=topology.seconds)
    passed, beside = beside_seconds(costs, gpu, ASSUMED, topology.seconds)
    counts = costs.counts
    many = {key: total for key, total in counts.collectives.items() if len(key.ranks) > 1}
    return Figures(
        numbers={
            "parameters": costs.parameters,
            "tokens": costs.tokens,
            "model_flops": times.model_flops,
            "flops": sum(part.flops for part in times.parts.values()),
            "kernels": sum(part.launches for part in times.parts.values()),
            "waits": (counts.syncs + counts.uploads).total(),
            "passed": passed,
            "beside": beside,
        },
        states={
            PARAMETERS: costs.parameter_bytes,
            GRADIENTS: costs.gradient_bytes,
            OPTIMIZER: costs.optimizer_bytes,
            **{f"{name} on the host": size for name, size in costs.host.items()},
        },
        seconds={name: part.total for name, part in times.parts.items()},
        calls={key: total.calls for key, total in many.items()},
        bytes={key: total.bytes for key, total in many.items()},
        peaks={
            (phase, name): size
            for phase, peak in costs.peaks.items()
            for name, size in peak.by_category.items()
        },
        kept={
            (phase, part): size
            for phase, peak in costs.peaks.items()
            for part, size in peak.activations_by_part.items()
        },
    )


def with_micro_batches(costs: StepCosts, gpu: Gpu, topology: Topology, micro_batches: int) -> Figures:
    """Return the figures of a step of more micro batches than the simulated three, all like the second one.

    Memory does not depend on their number, from the second one on.
    """
    whole = figures_of(costs, gpu, topology)
    if costs.middle is None:
        return whole
    first, second = (figures_of(replace(costs, counts=each), gpu, topology) for each in costs.middle)
    more = micro_batches - 3
    found = combined([(1, whole), (more, second), (-more, first)])
    tokens = {"tokens": costs.tokens / 3 * micro_batches, "parameters": whole.numbers["parameters"]}
    return replace(
        found, states=whole.states, peaks=whole.peaks, kept=whole.kept, numbers={**found.numbers, **tokens}
    )


def combined(terms: Iterable[tuple[float, Figures]]) -> Figures:
    """Return the sum of figures, each with its factor."""
    totals: dict[str, dict[Any, float]] = {each.name: defaultdict(float) for each in fields(Figures)}
    for factor, figures in terms:
        for name, total in totals.items():
            for key, value in getattr(figures, name).items():
                total[key] += factor * value
    return Figures(**{name: dict(total) for name, total in totals.items()})
