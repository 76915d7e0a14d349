"""Candidates at one shape in one dtype: built, checked, and run in turn."""

import statistics
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from common.rounds import Ratio, in_turn
from common.timers import DEVICE, clock
from layers.candidate import DTYPES, Candidate, NotMeasured, Shape, Weights, draw_rows
from layers.catalogue import CANDIDATES, LIMITS
from layers.oracle import TOLERANCE, error_of, expert_counts

WARM_UP_ROUNDS = 3
NUM_INPUTS = 5  # the rounds go through them, so that loads change
INPUT_SEED, UPSTREAM_SEED = 100, 99
# A candidate whose pass takes both longer than this and so many times the fastest one's is left out.
MOST_SECONDS, MOST_TIMES = 5.0, 20.0


@dataclass
class Seconds:
    """Of every round: the forward pass, and it with the backward pass."""

    forward: list[float] = field(default_factory=list)
    both: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, pairs: Iterable[tuple[float, float]]) -> "Seconds":
        """From (forward, both) of every round."""
        return cls(*map(list, zip(*pairs, strict=True)))


@dataclass
class Measured:
    """What was found at one shape in one dtype, by candidate.

    loads: of each input, the largest number of pairs of an expert over the mean. errors: the largest relative
    error. left_out: why a candidate has no times.
    """

    shape: Shape
    dtype: str
    loads: list[float]
    seconds: dict[str, Seconds] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def limit(self, direction: str) -> list[float] | None:
        """Return seconds of the limit that is faster in this direction, `forward` or `both`."""
        times = [getattr(self.seconds[name], direction) for name in LIMITS if name in self.seconds]
        return min(times, key=statistics.median, default=None)

    def over_limit(self, name: str, direction: str) -> Ratio | None:
        """Return a candidate's ratio to the limit; None where none was measured."""
        limit = self.limit(direction)
        return None if limit is None else Ratio.of(getattr(self.seconds[name], direction), limit)

    def ours_over(self, name: str, direction: str) -> Ratio | None:
        """Our layer's ratio to a candidate."""
        if "ours" not in self.seconds or name == "ours":
            return None
        return Ratio.of(getattr(self.seconds["ours"], direction), getattr(self.seconds[name], direction))


def measure(shape: Shape, dtype: str, names: list[str], rounds: int) -> Measured:
    """Build and check all candidates, then run them in turn; nothing is run if our layer is wrong."""
    weights = Weights.draw(shape)
    loads = [largest_load(shape, weights, inputs_of("routed", shape, dtype, n)) for n in range(NUM_INPUTS)]
    found = Measured(shape, dtype, loads)
    modules = {}
    for name in names:
        try:
            modules[name] = _checked(name, shape, dtype, weights, found)
        except NotMeasured as reason:
            found.left_out[name] = str(reason)
        except Exception as error:  # another library's layer that does not run here must not hide the rest
            found.left_out[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    del weights
    if "ours" not in found.left_out:
        rows = {CANDIDATES[name].rows for name in modules}
        inputs = {kind: [inputs_of(kind, shape, dtype, n) for n in range(NUM_INPUTS)] for kind in rows}
        upstream = {kind: upstream_of(kind, shape, dtype) for kind in rows}
        runs = {
            name: partial(_run, module, inputs[CANDIDATES[name].rows], upstream[CANDIDATES[name].rows])
            for name, module in modules.items()
        }
        found.left_out |= _too_slow({name: run(0)[1] for name, run in runs.items()})
        runs = {name: run for name, run in runs.items() if name not in found.left_out}
        seconds = in_turn(runs, rounds, WARM_UP_ROUNDS)
        found.seconds = {name: Seconds.of(pairs) for name, pairs in seconds.items()}
    return found


def _checked(name: str, shape: Shape, dtype: str, weights: Weights, found: Measured) -> nn.Module:
    """Return the module, if it computes what the loop over experts does."""
    candidate = CANDIDATES[name]
    module = build(candidate, shape, dtype, weights)
    rows, upstream = inputs_of(candidate.rows, shape, dtype, 0), upstream_of(candidate.rows, shape, dtype)
    found.errors[name] = error_of(candidate, module, shape, weights, rows, upstream)
    tolerance = TOLERANCE[DTYPES[dtype]]
    if not found.errors[name] <= tolerance:
        raise NotMeasured(f"wrong: relative error {found.errors[name]:.2g}, expected at most {tolerance}")
    return module


def build(candidate: Candidate, shape: Shape, dtype: str, weights: Weights) -> nn.Module:
    """Build the candidate's module, without what its library warns about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return candidate.build(shape, DTYPES[dtype], weights).to(DEVICE)


def inputs_of(rows: str, shape: Shape, dtype: str, number: int) -> Tensor:
    """Return input rows, [T or T*k, H]."""
    return _draw(rows, shape, dtype, INPUT_SEED + number)


def upstream_of(rows: str, shape: Shape, dtype: str) -> Tensor:
    """Return the gradient of the output."""
    return _draw(rows, shape, dtype, UPSTREAM_SEED)


def _draw(rows: str, shape: Shape, dtype: str, seed: int) -> Tensor:
    num_rows = shape.pairs if rows == "even" else shape.tokens
    return draw_rows(seed, num_rows, shape.hidden, DTYPES[dtype]).to(DEVICE)


def largest_load(shape: Shape, weights: Weights, hidden_TH: Tensor) -> float:
    """Return the largest number of pairs of an expert over the mean."""
    counts_E = expert_counts(weights, hidden_TH.cpu(), shape.choices)
    return float(counts_E.max() / counts_E.float().mean())


def _too_slow(seconds: dict[str, float]) -> dict[str, str]:
    """Return the candidates that would keep the others waiting, with the reason."""
    fastest = min(seconds.values(), default=0.0)
    return {
        name: f"a pass takes {took:.1f} s, {took / fastest:.0f} times the fastest candidate's"
        for name, took in seconds.items()
        if took > max(MOST_SECONDS, MOST_TIMES * fastest)
    }


def _run(module: nn.Module, inputs: list[Tensor], upstream: Tensor, number: int) -> tuple[float, float]:
    return run_once(module, inputs[number % len(inputs)], upstream)


def run_once(module: nn.Module, rows: Tensor, upstream: Tensor) -> tuple[float, float]:
    """Return seconds of forward, and of forward and backward with gradients made anew."""
    module.zero_grad(set_to_none=True)
    leaf = rows.detach().requires_grad_()
    begin = clock()
    output = module(leaf)
    middle = clock()
    output.backward(upstream)
    end = clock()
    module.zero_grad(set_to_none=True)
    return middle - begin, end - begin
