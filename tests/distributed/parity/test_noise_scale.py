"""The gradient noise scale of two ranks is that of one with as many micro batches, at every ZeRO stage."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks.matrix import Case, name
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import run_each

MEASURED: dict[str, Any] = {"steps": 2, "log__noise_scale_every": 1, "optimizer__eps": 1e-3}
PLAIN = Case(1, 1, 1, 1, False, 0, "none", 1, "top_2", "fp32")
TWO = replace(PLAIN, ranks=2, accumulation=2)
CASES = [replace(TWO, zero=3, recompute="full"), replace(TWO, zero=1), replace(TWO, zero=2, expert=2), TWO]


def assert_alike(pool: Pool, cases: list[Case], folder: Path) -> None:
    alone = {
        case: pool.run(run_each, [{**case.changes(folder), **MEASURED}], ranks=1, timeout_s=600)[0][0]
        for case in {case.alone() for case in cases}
    }
    found = pool.run(
        run_each, [{**case.changes(folder), **MEASURED} for case in cases], ranks=2, timeout_s=600
    )
    for place, case in enumerate(cases):
        for rank in found:
            for mine, expected in zip(rank[place]["noise"], alone[case.alone()]["noise"], strict=True):
                assert len(expected) == 3 and all(map(bool, expected.values()))
                shared = {key for key in expected if case.expert == 1 or not key.endswith("experts")}
                assert mine.keys() == shared
                for key in shared:
                    assert mine[key] == pytest.approx(expected[key], rel=1e-3), f"{name(case)}: {key}"


def test_layouts(pool: Pool, tmp_path: Path) -> None:
    assert_alike(pool, CASES[:1], tmp_path)


@pytest.mark.full
def test_more_layouts(pool: Pool, tmp_path: Path) -> None:
    assert_alike(pool, CASES, tmp_path)
