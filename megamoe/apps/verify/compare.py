"""What differs between a run and its reference, beside what rounding makes of the same run."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megamoe.apps.routing_record.record import META, Rows, read_rows
from megamoe.apps.verify.train_run import Metrics
from megamoe.checkpoint.format.reader import MEAN, MOMENTS, MUON_MOMENT, WEIGHT, CheckpointReader
from megamoe.io import read_json

# The first moment is a multiple of the gradient after the first step.
KINDS = {
    WEIGHT: "weights",
    MEAN: "weights' mean",
    f"{MOMENTS[0]}/": "gradients",
    f"{MUON_MOMENT}/": "gradients",
    f"{MOMENTS[1]}/": "squared gradients",
}
OF_METRICS = 0.05  # a smaller metric is judged as if it were this: an entropy near 0 is a sum of terms near 1
SHOWN = 2  # differences of each kind


@dataclass(frozen=True)
class Result:
    """What a run left in its folder, and the metrics of each step and of the evaluation."""

    metrics: Metrics
    folder: Path

    def tensors(self, step: int) -> dict[str, Tensor]:
        """Return the floating-point tensors of a checkpoint, by name."""
        with CheckpointReader(self.folder / "run" / "checkpoints" / f"step_{step:08d}") as reader:
            found = {name: reader.tensor(name) for prefix in KINDS for name in reader.names(prefix)}
        return {name: tensor.double() for name, tensor in found.items() if tensor.is_floating_point()}

    @property
    def record(self) -> Path:
        """The folder of the experts chosen for every token, see `routing_record`."""
        return self.folder / "record"

    def other_choices(self, other: "Result") -> set[tuple[int, int, int]]:
        """Return (step, MoE layer, token) where two runs chose other experts."""
        found = set()
        if not self.record.exists():
            return set()
        layers = len(read_json(self.record / META, 1 << 24)["moe.layers"])
        for step in range(1, len(self.metrics)):  # the last are of an evaluation
            both = (read_rows(result.record, step, "train", layers) for result in (self, other))
            for layer, (one, two) in enumerate(zip(*both, strict=True), 1):
                found |= {(step, layer, token) for token in _other_tokens(one, two)}
        return found


def _other_tokens(one: Rows, other: Rows) -> list[int]:
    token_T = torch.arange(len(one.index_T))
    (left_TK, left_T), (right_TK, right_T) = one.choices(token_T), other.choices(token_T)
    width = max(left_TK.shape[1], right_TK.shape[1])
    pad = [torch.nn.functional.pad(t, (0, width - t.shape[1])).sort(1).values for t in (left_TK, right_TK)]
    return token_T[(pad[0] != pad[1]).any(1) | (left_T != right_T)].tolist()


@dataclass(frozen=True)
class Difference:
    """One value that differs. size, allowed: relative to the norm of the value."""

    step: int
    kind: str
    name: str
    size: float
    allowed: float

    def __str__(self) -> str:
        """For a reader."""
        size = f"differs by {self.size:.1e} (rounding: {self.allowed:.0e})"
        return f"step {self.step}: {self.kind}: {self.name} {size}"


def differences(
    found: Result, alone: Result, rounded: Result | None, times: float, floor: float
) -> tuple[list[Difference], dict[str, float]]:
    """Return what differs by more than rounding, the first step first, and the largest of each kind.

    rounded: the run on one rank with other rounding. A value may differ by `times` its difference there, and
    always by `floor`, both relative to its norm.
    """
    largest: dict[str, float] = {}
    wrong: list[Difference] = []

    def judge(step: int, kind: str, name: str, one: Tensor | None, *others: Tensor | None) -> None:
        other, noise = others
        if one is None or other is None or one.shape != other.shape:
            wrong.append(Difference(step, kind, f"{name} (missing or of another shape)", float("inf"), 0.0))
            return
        least = OF_METRICS if kind == "metrics" else 1e-30
        size = _distance(one, other, least)
        allowed = floor if noise is None else max(floor, times * _distance(noise, other, least))
        largest[kind] = max(largest.get(kind, 0.0), size)
        if not size <= allowed:
            wrong.append(Difference(step, kind, name, size, allowed))

    results = (found, alone, rounded or alone)
    for step, runs in enumerate(zip(*(result.metrics for result in results), strict=True), 1):
        tables = [{name: torch.tensor(value).double() for name, value in run.items()} for run in runs]
        for name in sorted({*tables[0], *tables[1]}):
            judge(step, "metrics", name, *(table.get(name) for table in tables))
        if step in (1, len(found.metrics) - 1):
            tables = [result.tensors(step) for result in results]
            for name in sorted({*tables[0], *tables[1]}):
                judge(step, _kind(name), name.partition("/")[2], *(table.get(name) for table in tables))
    return wrong, largest


def first_of(wrong: list[Difference]) -> list[Difference]:
    """Return the largest of each kind in the first step that differs, gradients first."""
    step = min((each.step for each in wrong), default=0)
    order = [*dict.fromkeys(KINDS.values())][1:]
    found: list[Difference] = []
    of_step = sorted((each for each in wrong if each.step == step), key=lambda each: -each.size)
    for kind in sorted({each.kind for each in of_step}, key=lambda kind: (kind not in order, kind)):
        found += [each for each in of_step if each.kind == kind][:SHOWN]
    return found


def _kind(name: str) -> str:
    return next(kind for prefix, kind in KINDS.items() if name.startswith(prefix))


def _distance(one: Tensor, other: Tensor, least: float) -> float:
    if torch.equal(one, other):
        return 0.0
    return float((one - other).norm() / other.norm().clamp_min(least))
