"""Pipeline stages and parts of sequences train as one rank does, with everything else that layouts have."""

from typing import Any

import pytest

from tests.support.ranks.matrix import Case, assert_case, covering, name, runs_of, staged_cases
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import ds_config, run_each

Found = list[dict[str, Any]]  # what each rank showed
STEPS = 2
STAGED = staged_cases()
# What decides which rank has which part is combined in `make test`; any two choices in `make test-full`.
FEW = covering(STAGED, ("pipeline", "context", "chunks"))
MORE = [case for case in covering(STAGED) if case not in FEW]
# In fp32 and bf16, without weights that two stages hold: their gradients are summed in another order.
UNTIED = {"model__num_layers": 4, "model__tie_embeddings": False, "train__global_batch_size": 6, "steps": 3}
ALONE: dict[str, dict[str, Any]] = {
    "fp32": {**UNTIED, "moe__layers": {"at": [2, 4]}},
    "fewer micro batches than stages": {
        **UNTIED,
        "moe__layers": {"at": [2, 4]},
        "train__global_batch_size": 3,
    },
    "recomputed": {**UNTIED, "moe__layers": {"at": [2, 4]}, "model__recompute": "full"},
    "one_moe": {**UNTIED, "moe__layers": {"at": [1]}},
    "bf16": {**UNTIED, "moe__layers": {"at": [2, 4]}, "parallel__deepspeed": ds_config("zero0_bf16")},
}
PIPELINES: dict[str, dict[str, Any]] = {
    "2": {"parallel__pipeline": 2},
    "2 uneven": {"parallel__pipeline": 2, "parallel__blocks_per_stage": [3, 1]},
    "2 interleaved": {"parallel__pipeline": 2, "parallel__pipeline_chunks": 2},
    "4": {"parallel__pipeline": 4},
}


def trained(pool: Pool, runs: list[dict[str, Any]], ranks: int) -> list[Found]:
    """Return what each rank showed, by run."""
    found = pool.run(run_each, runs, ranks=ranks, timeout_s=1200)
    return [[rank[place] for rank in found] for place in range(len(runs))]


@pytest.fixture(scope="module")
def found(pool: Pool, tmp_path_factory: Any, request: pytest.FixtureRequest) -> dict[Case, Found]:
    """Of the selected cases and their plain runs."""
    selected = {item.name for item in request.session.items}
    cases = [case for case in (*FEW, *MORE) if any(f"[{name(case)}]" in item for item in selected)]
    folder = tmp_path_factory.mktemp("cases")
    alone = sorted({case.alone() for case in cases}, key=name)
    of_cases = dict(zip(cases, trained(pool, runs_of(cases, STEPS, folder), ranks=4), strict=True))
    return of_cases | dict(zip(alone, trained(pool, runs_of(alone, STEPS, folder), ranks=1), strict=True))


@pytest.mark.parametrize(
    "case", [*FEW, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)], ids=name
)
def test_choices_together(found: dict[Case, Found], case: Case) -> None:
    assert_case(case, found[case], found[case.alone()][0])


# In `make test` each pipeline with one run.
QUICK = [("fp32", "4"), ("recomputed", "2 interleaved"), ("one_moe", "2 uneven"), ("bf16", "2")]
PAIRS = [(run, stages) for run in ALONE for stages in PIPELINES]


@pytest.fixture(scope="module")
def exact(pool: Pool, request: pytest.FixtureRequest) -> dict[tuple[str, str], Found]:
    selected = {item.name for item in request.session.items}
    pairs = [(run, stages) for run, stages in PAIRS if any(f"[{run}-{stages}]" in item for item in selected)]
    asked = [run for run in ALONE if any(run == pair[0] for pair in pairs)]
    alone = trained(pool, [ALONE[run] for run in asked], ranks=1)
    found = dict(zip([(run, "") for run in asked], alone, strict=True))
    for ranks in (2, 4):
        these = [pair for pair in pairs if PIPELINES[pair[1]]["parallel__pipeline"] == ranks]
        if not these:
            continue
        runs = [{**ALONE[run], **PIPELINES[stages]} for run, stages in these]
        found |= dict(zip(these, trained(pool, runs, ranks), strict=True))
    return found


@pytest.mark.parametrize(
    ("run", "stages"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.full, id="-".join(pair))
        for pair in PAIRS
    ],
)
def test_a_pipeline_alone_is_one_rank_bit_for_bit(exact: Any, run: str, stages: str) -> None:
    (alone,) = exact[run, ""]
    for rank in exact[run, stages]:
        for word in ("lm_loss", "grad_norm"):
            assert rank[word] == alone[word], word
        assert rank["loss"] == pytest.approx(alone["loss"], rel=1e-12)  # summed over layers by stage
