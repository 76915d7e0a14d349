"""Muon under every layout is that of one rank: losses, norms, and the weights at the end."""

from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megamoe.checkpoint.format.reader import WEIGHT, CheckpointReader
from tests.support.ranks.matrix import Case, covering, every_case, name, staged_cases
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import assert_as_alone, run_each

STEPS = 4
# By a small eps AdamW would make whole steps of gradients that are 0 but for rounding (a bias of the keys).
MUON: dict[str, Any] = {
    "optimizer__name": "muon",
    "optimizer__muon": {"momentum": 0.9},
    "optimizer__lr": 3e-3,
    "optimizer__eps": 1e-3,
}

PLAIN = Case(1, 1, 1, 1, False, 0, "none", 1, "top_2", "fp32")


def cases() -> list[Case]:
    """In fp32, with what matters to Muon."""
    alike = [
        case
        for case in every_case()
        if (case.precision, case.recompute, case.accumulation, case.node) == ("fp32", "none", 1, 0)
        and not (case.tensor > 1 and not case.sequence)
    ]
    staged = [case for case in staged_cases() if (case.recompute, case.node) == ("none", 0)]
    return [*alike, *covering(staged)]


# Every stage of ZeRO, every kind of cut, weights of every kind.
QUICK = [
    replace(PLAIN, ranks=2, expert=2, zero=3, preset="moec"),
    replace(PLAIN, ranks=4, tensor=2, expert=2, expert_tensor=2, sequence=True, zero=1, preset="moec"),
]


def saved(case: Case, folder: Path) -> dict[str, Tensor]:
    with CheckpointReader(folder / run_of(case) / "checkpoints" / f"step_{STEPS:08d}") as reader:
        return {name: reader.tensor(name) for name in reader.names(WEIGHT)}


def run_of(case: Case) -> str:
    return "run_" + "_".join(map(str, astuple(case)))


def trained(pool: Pool, cases: list[Case], folder: Path) -> dict[Case, list[dict[str, Any]]]:
    common = {**MUON, "steps": STEPS, "save": True, "output": str(folder)}
    runs = [{**case.changes(folder), **common, "name": run_of(case)} for case in cases]
    found = pool.run(run_each, runs, ranks=cases[0].ranks, timeout_s=3600)
    return {case: [rank[place] for rank in found] for place, case in enumerate(cases)}


def assert_alike(pool: Pool, cases: list[Case], folder: Path) -> None:
    """Train each case and its plain run; compare what they show and what they saved."""
    plain = trained(pool, sorted({case.alone() for case in cases}, key=name), folder)
    for ranks in sorted({case.ranks for case in cases}):
        chosen = [case for case in cases if case.ranks == ranks and case not in plain]
        for case, found in trained(pool, chosen, folder).items():
            assert_as_alone(found, plain[case.alone()][0], name(case))
            expected = saved(case.alone(), folder)
            for key, weight in saved(case, folder).items():
                difference = float((weight.double() - expected[key].double()).abs().max())
                assert difference < 1e-5, f"{name(case)}: {key}: {difference}"


def test_layouts(pool: Pool, tmp_path: Path) -> None:
    assert_alike(pool, QUICK, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("few", [True, False])
def test_every_layout(pool: Pool, tmp_path: Path, few: bool) -> None:
    assert_alike(pool, covering(cases()) if few else cases(), tmp_path)
