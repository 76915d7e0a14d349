"""Waits of the host and launches of kernels: how many for each layer, each micro batch and each step.

Four runs of a model, with a layer more, a micro batch more and both, tell apart what a step costs:
step + layers * layer + micro_batches * (micro_batch + layers * layer_of_micro_batch). `budget.json` has what
each may be; to write it anew:

    python -m tests.cuda.budget
"""

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.cuda.runs import Found, Run, run_on_device
from tests.cuda.training import small
from tests.support.ranks.runs import ds_config

PATH = Path(__file__).with_name("budget.json")
LAYERS = 2
ROUNDED_TO = {"synchronisations": 1, "kernels": 25}  # PyTorch versions differ by a few kernels
SLACK = {"synchronisations": 1.0, "kernels": 1.05}
TOP_2: dict[str, Any] = {
    "moe__router": {"selector": {"name": "top_k", "k": 2}},
    "moe__losses": {"switch_balance": 0.01, "z_loss": 0.001},
    "parallel__deepspeed": ds_config("zero1_bf16"),
}
LIMITED_TO_GROUPS: dict[str, Any] = {
    "masks": [{"name": "group_limit", "num_groups": 4, "keep": 2}],
    "selector": {"name": "top_k", "k": 2},
}
TENSOR = {"parallel__tensor": 2, "parallel__sequence": True, "parallel__expert": 2}


@dataclass(frozen=True)
class Budgeted:
    """A run whose first rank is counted.

    changes: to `small`. replicas: of the model, each with its micro batches. stages: each has the layers.
    """

    ranks: int
    changes: dict[str, Any]
    replicas: int = 1
    stages: int = 1


BUDGETED = {
    "all_experts_on_each_rank": Budgeted(1, {**TOP_2, "moe__num_shared_experts": 1}),
    "expert_parallel": Budgeted(2, {**TOP_2, "parallel__expert": 2}, replicas=2),
    "masked": Budgeted(
        2,
        {**TOP_2, "parallel__expert": 2, "moe__router": LIMITED_TO_GROUPS, "moe__num_experts": 8},
        replicas=2,
    ),
    "tensor_parts": Budgeted(2, {**TOP_2, **TENSOR}),
    "two_stages": Budgeted(2, {**TOP_2, "parallel__pipeline": 2}, stages=2),
}


def budget_runs(name: str) -> list[Run]:
    """The four runs of a budget."""
    case = BUDGETED[name]
    return [
        Run(
            small(
                f"{name}_{layers}_{micro_batches}",
                **case.changes,
                model__num_layers=layers * case.stages,
                train__global_batch_size=2 * case.replicas * micro_batches,
            ),
            case.ranks,
        )
        for layers, micro_batches in ((LAYERS, 1), (LAYERS + 1, 1), (LAYERS, 2), (LAYERS + 1, 2))
    ]


@dataclass
class Costs:
    """Of each: the number of waits or kernels, and what they are."""

    layer_of_micro_batch: Counter[str]
    layer: Counter[str]
    micro_batch: Counter[str]
    step: Counter[str]

    @classmethod
    def of(cls, one: Counter[str], layers: Counter[str], micro: Counter[str], both: Counter[str]) -> "Costs":
        """From the measured steps of the four runs, in the order of `budget_runs`."""
        more_layers = _difference(layers, one)
        more_micro = _difference(micro, one)
        inner = _difference(_difference(both, micro), more_layers)
        layer = _difference(more_layers, inner)
        micro_batch = _difference(more_micro, _times(inner, LAYERS))
        step = _difference(_difference(one, more_micro), _times(layer, LAYERS))
        return cls(inner, layer, micro_batch, step)

    def totals(self) -> dict[str, int]:
        return {name: sum(counter.values()) for name, counter in vars(self).items()}

    def told(self) -> str:
        """A line for each place where the host waits, or each kernel."""
        return "\n".join(
            f"{count:4d} a {name.replace('_', ' ')}: {what}"
            for name, counter in vars(self).items()
            for what, count in sorted(counter.items(), key=lambda item: -item[1])
            if count
        )


def _difference(left: Counter[str], right: Counter[str]) -> Counter[str]:
    return Counter({key: left[key] - right[key] for key in left.keys() | right.keys()})


def _times(counter: Counter[str], factor: int) -> Counter[str]:
    return Counter({key: count * factor for key, count in counter.items()})


def costs_of(name: str, found: dict[str, Found]) -> dict[str, Costs]:
    """Of the waits (`synchronisations`) and of the kernels."""
    steps = [found[run.name].step() for run in budget_runs(name)]
    return {
        "synchronisations": Costs.of(*(Counter(step["syncs"]) for step in steps)),
        "kernels": Costs.of(*(Counter(step["kernels"]) for step in steps)),
    }


def _rounded_up(count: int, kind: str) -> int:
    return math.ceil(count * SLACK[kind] / ROUNDED_TO[kind]) * ROUNDED_TO[kind]


def measured(folder: Path) -> dict[str, dict[str, dict[str, int]]]:
    """What each costs now, in the form of `budget.json`: counts rounded up."""
    runs = [run for name in BUDGETED for run in budget_runs(name)]
    found = run_on_device(runs, folder, devices=2)
    return {
        name: {
            kind: {part: _rounded_up(count, kind) for part, count in costs.totals().items()}
            for kind, costs in costs_of(name, found).items()
        }
        for name in BUDGETED
    }


def budget() -> dict[str, dict[str, dict[str, int]]]:
    """What each may cost, of `budget.json`."""
    return json.loads(PATH.read_text())


if __name__ == "__main__":
    with TemporaryDirectory() as own:
        PATH.write_text(json.dumps(measured(Path(own)), indent=1) + "\n")
