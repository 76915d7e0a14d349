"""QK-Clip under every layout is that of one rank: the largest logit of each head, losses and norms."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks.matrix import Case, name
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import assert_as_alone, run_each

CLIP: dict[str, Any] = {
    "steps": 3,
    "optimizer__qk_clip": 0.2,  # most heads are above it in the first step
    "optimizer__lr": 1e-2,
    "optimizer__eps": 1e-3,
    "model__num_attention_heads": 4,
    "model__attention__query_key_norm": "none",
}
ATTENTIONS: dict[str, dict[str, Any]] = {
    "own keys": {},
    "shared keys": {"model__num_query_groups": 2},
    "latent": {
        "model__attention": {"window": 3, "window_blocks": [2]},
        "model__rotary": {},
        "model__latent": {
            "query_rank": 12,
            "key_value_rank": 16,
            "nope_size": 8,
            "rope_size": 4,
            "value_size": 8,
        },
    },
}
PLAIN = Case(1, 1, 1, 1, False, 0, "none", 1, "top_2", "fp32", blocks=4)
QUICK = [
    replace(PLAIN, ranks=2, zero=3, recompute="full"),
    replace(PLAIN, ranks=2, tensor=2, sequence=True, zero=1),
]
CASES = [
    *QUICK,
    replace(PLAIN, ranks=2, zero=2, expert=2, recompute="some"),
    replace(PLAIN, ranks=2, pipeline=2, accumulation=2, recompute="full"),
    replace(PLAIN, ranks=2, context=2, zero=1),
    replace(PLAIN, ranks=2, tensor=2, sequence=True),
]


def assert_alike(pool: Pool, cases: list[Case], folder: Path, attention: str) -> None:
    common = {**CLIP, **ATTENTIONS[attention]}
    alone = {}
    for case in {case.alone() for case in cases}:
        (alone[case],) = pool.run(run_each, [{**case.changes(folder), **common}], ranks=1, timeout_s=600)[0]
        assert all(step["attention/clipped_heads"] for step in alone[case]["logits"][:1])
    found = pool.run(run_each, [{**case.changes(folder), **common} for case in cases], ranks=2, timeout_s=600)
    for place, case in enumerate(cases):
        expected = alone[case.alone()]
        ranks = [rank[place] for rank in found]
        assert_as_alone(ranks, expected, name(case))
        for rank in ranks:
            for step, logits in enumerate(expected["logits"]):
                assert rank["logits"][step].keys() == logits.keys()
                for key, value in logits.items():
                    assert rank["logits"][step][key] == pytest.approx(value, rel=1e-4), f"{name(case)}: {key}"


def test_layouts(pool: Pool, tmp_path: Path) -> None:
    assert_alike(pool, QUICK, tmp_path, "shared keys")


@pytest.mark.full
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_more_layouts(pool: Pool, tmp_path: Path, attention: str) -> None:
    assert_alike(pool, CASES, tmp_path, attention)


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_masters_in_bf16(pool: Pool, tmp_path: Path, zero: int) -> None:
    """The fp32 masters are scaled: every stage clips as one rank does at ZeRO 0, within bf16's rounding."""
    plain, case = replace(PLAIN, precision="bf16"), replace(PLAIN, precision="bf16", ranks=2, zero=zero)
    common = {**CLIP, "optimizer__lr": 1e-4}
    (alone,) = pool.run(run_each, [{**case.alone().changes(tmp_path), **common}], ranks=1, timeout_s=600)[0]
    found = pool.run(run_each, [{**case.changes(tmp_path), **common}], ranks=2, timeout_s=600)
    assert plain.precision == case.precision
    for (rank,) in found:
        for step, logits in enumerate(alone["logits"]):
            largest = rank["logits"][step]["attention/largest_logit"]
            assert largest == pytest.approx(logits["attention/largest_logit"], rel=0.03), (step, zero)
        assert rank["logits"][2]["attention/largest_logit"] < 0.3
