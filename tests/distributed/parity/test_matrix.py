"""Every layout trains as one rank does: TP x EP x expert TP x ZeRO x sequence parallelism x recomputation."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks.matrix import Case, assert_case, covering, every_case, name, runs_of
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import run_each

ALL = every_case()
# What works on the same tensors is combined in `make test`; all the rest in `make test-full`.
FEW = covering(ALL, ("tensor", "expert", "zero"))
LAYOUTS = sorted({(case.ranks, case.tensor, case.expert, case.expert_tensor, case.sequence) for case in ALL})
ALONE: dict[tuple[Case, int], dict[str, Any]] = {}  # what plain runs of so many steps showed


def trained(pool: Pool, runs: list[dict[str, Any]], ranks: int) -> list[list[dict[str, Any]]]:
    """Return what each rank showed, by run."""
    found = pool.run(run_each, runs, ranks=ranks, timeout_s=3600)
    return [list(shown) for shown in zip(*found, strict=True)]


def assert_trained_as_alone(pool: Pool, cases: list[Case], steps: int, folder: Path) -> None:
    """Train cases of equal numbers of ranks in one world, and compare each with its plain run."""
    alone = sorted({case.alone() for case in cases if (case.alone(), steps) not in ALONE}, key=name)
    if alone:
        found = trained(pool, runs_of(alone, steps, folder), ranks=1)
        ALONE.update(zip([(case, steps) for case in alone], [shown for (shown,) in found], strict=True))
    several = trained(pool, runs_of(cases, steps, folder), cases[0].ranks)
    for case, of_ranks in zip(cases, several, strict=True):
        assert_case(case, of_ranks, ALONE[case.alone(), steps])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_two_ways_to_cut_the_model_together(pool: Pool, tmp_path: Path, ranks: int) -> None:
    assert_trained_as_alone(pool, [case for case in FEW if case.ranks == ranks], 2, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_choices_of_layout(pool: Pool, layout: Any, tmp_path: Path) -> None:
    cases = [
        case
        for case in ALL
        if (case.ranks, case.tensor, case.expert, case.expert_tensor, case.sequence) == layout
    ]
    assert_trained_as_alone(pool, cases, 5, tmp_path)
