"""muP under every layout is that of one rank: initial weights, factors and rates, by losses and norms."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks.matrix import Case, name
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import assert_as_alone, run_each

MUP: dict[str, Any] = {
    "steps": 3,
    "model__mup": {"base": 16, "base_head_size": 8, "base_layers": 1},
    "optimizer__lr": 1e-2,
    "optimizer__eps": 1e-3,
}
PLAIN = Case(1, 1, 1, 1, False, 0, "none", 1, "top_2", "fp32")
# Every stage of ZeRO and every kind of cut: of heads, of the vocabulary, of experts and in them.
CASES = [
    replace(PLAIN, ranks=2, expert=2, zero=3),
    replace(PLAIN, ranks=2, tensor=2, expert_tensor=2, sequence=True, zero=1),
    replace(PLAIN, ranks=2, zero=2),
    replace(PLAIN, ranks=2, tensor=2, sequence=True),
]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("tied", [True, False])
def test_layouts(pool: Pool, tmp_path: Path, kind: str, tied: bool) -> None:
    common = {**MUP, "optimizer__name": kind, "model__tie_embeddings": tied}
    alone = {}
    for case in {case.alone() for case in CASES}:
        (alone[case],) = pool.run(run_each, [{**case.changes(tmp_path), **common}], ranks=1, timeout_s=600)[0]
    found = pool.run(
        run_each, [{**case.changes(tmp_path), **common} for case in CASES], ranks=2, timeout_s=600
    )
    for place, case in enumerate(CASES):
        assert_as_alone([rank[place] for rank in found], alone[case.alone()], name(case))
