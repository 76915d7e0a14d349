"""Every layout trains as one rank does: TP x EP x expert TP x ZeRO x sequence parallelism x recomputation."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks.matrix import Case, assert_case, covering, every_case, name, runs_of
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import run_each

Found = dict[Case, list[dict[str, Any]]]  # what each rank showed
FEW_STEPS, STEPS = 2, 5
ALL = every_case()
# What works on the same tensors is combined in `make test`; all the rest in `make test-full`.
FEW = covering(ALL, ("tensor", "expert", "zero"))
LAYOUTS = sorted({(case.ranks, case.tensor, case.expert, case.expert_tensor, case.sequence) for case in ALL})


def trained(pool: Pool, cases: list[Case], steps: int, folder: Path) -> Found:
    """Train cases of equal numbers of ranks in one world."""
    runs, ranks = runs_of(cases, steps, folder), cases[0].ranks
    found = pool.run(run_each, runs, ranks=ranks, timeout_s=3600)
    return {case: [rank[place] for rank in found] for place, case in enumerate(cases)}


def alone(pool: Pool, cases: list[Case], steps: int, folder: Path) -> Found:
    return trained(pool, sorted({case.alone() for case in cases}, key=name), steps, folder)


@pytest.fixture(scope="module")
def few_alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return alone(pool, FEW, FEW_STEPS, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def few(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Found:
    found: Found = {}
    for ranks in (1, 2, 4):
        cases = [case for case in FEW if case.ranks == ranks]
        found |= trained(pool, cases, FEW_STEPS, tmp_path_factory.mktemp("few"))
    return found


@pytest.mark.parametrize("case", FEW, ids=name)
def test_any_two_ways_to_cut_the_model_together(few: Found, few_alone: Found, case: Case) -> None:
    assert_case(case, few[case], few_alone[case.alone()][0])


@pytest.fixture(scope="module")
def all_alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return alone(pool, ALL, STEPS, tmp_path_factory.mktemp("alone"))


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_choices_of_layout(pool: Pool, all_alone: Found, layout: Any, tmp_path: Path) -> None:
    cases = [
        case
        for case in ALL
        if (case.ranks, case.tensor, case.expert, case.expert_tensor, case.sequence) == layout
    ]
    for case, found in trained(pool, cases, STEPS, tmp_path).items():
        assert_case(case, found, all_alone[case.alone()][0])
