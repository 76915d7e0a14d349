"""Every layout trains as one rank does: TP x EP x expert TP x ZeRO x sequence parallelism x recomputation."""

from typing import Any

import pytest

from tests.distributed.matrix import Case, assert_as_alone, every_case, few_cases, name, run_cases
from tests.distributed.pool import Pool

Found = dict[Case, dict[str, Any]]
FEW_STEPS, STEPS = 2, 5
ALL = every_case()
FEW = few_cases()
LAYOUTS = sorted({(case.ranks, case.tensor, case.expert, case.expert_tensor, case.sequence) for case in ALL})


def alone(pool: Pool, cases: list[Case], steps: int) -> Found:
    plain = sorted({case.alone() for case in cases}, key=name)
    (found,) = pool.run(run_cases, plain, steps, ranks=1, timeout_s=600)
    return found


@pytest.fixture(scope="module")
def few_alone(pool: Pool) -> Found:
    return alone(pool, FEW, FEW_STEPS)


@pytest.fixture(scope="module")
def few(pool: Pool) -> dict[int, list[Found]]:
    """The results by the number of ranks, each in one world."""
    cases = {ranks: [case for case in FEW if case.ranks == ranks] for ranks in (1, 2, 4)}
    return {n: pool.run(run_cases, mine, FEW_STEPS, ranks=n, timeout_s=600) for n, mine in cases.items()}


@pytest.mark.parametrize("case", FEW, ids=name)
def test_any_two_choices_together(few: dict[int, list[Found]], few_alone: Found, case: Case) -> None:
    assert_as_alone(case, [rank[case] for rank in few[case.ranks]], few_alone[case.alone()])


@pytest.fixture(scope="module")
def all_alone(pool: Pool) -> Found:
    return alone(pool, ALL, STEPS)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_choices_of_a_layout(pool: Pool, all_alone: Found, layout: tuple[int | bool, ...]) -> None:
    cases = [
        case
        for case in ALL
        if (case.ranks, case.tensor, case.expert, case.expert_tensor, case.sequence) == layout
    ]
    found = pool.run(run_cases, cases, STEPS, ranks=cases[0].ranks, timeout_s=3600)
    for case in cases:
        assert_as_alone(case, [rank[case] for rank in found], all_alone[case.alone()])
