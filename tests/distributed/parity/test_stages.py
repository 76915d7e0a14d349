"""Pipeline stages and parts of sequences train as one rank does, with everything else that layouts have."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.parity.test_matrix import assert_trained_as_alone, trained
from tests.support.ranks.matrix import Case, covering, staged_cases
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import ds_config

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


# In `make test` each pipeline with one run.
QUICK = [("fp32", "4"), ("recomputed", "2 interleaved"), ("one_moe", "2 uneven"), ("bf16", "2")]
OTHERS = [(run, stages) for run in ALONE for stages in PIPELINES if (run, stages) not in QUICK]


@pytest.mark.parametrize("cases", [FEW, pytest.param(MORE, marks=pytest.mark.full)], ids=["few", "more"])
def test_choices_together(pool: Pool, tmp_path: Path, cases: list[Case]) -> None:
    assert_trained_as_alone(pool, cases, 2, tmp_path)


@pytest.mark.parametrize("pairs", [QUICK, pytest.param(OTHERS, marks=pytest.mark.full)], ids=["few", "more"])
def test_a_pipeline_alone_is_one_rank_bit_for_bit(pool: Pool, pairs: list[tuple[str, str]]) -> None:
    alone = dict(zip(ALONE, trained(pool, list(ALONE.values()), ranks=1), strict=True))
    for ranks in (2, 4):
        these = [pair for pair in pairs if PIPELINES[pair[1]]["parallel__pipeline"] == ranks]
        several = trained(pool, [{**ALONE[run], **PIPELINES[stages]} for run, stages in these], ranks)
        for pair, found in zip(these, several, strict=True):
            (expected,) = alone[pair[0]]
            for rank in found:
                for word in ("lm_loss", "grad_norm"):
                    assert rank[word] == expected[word], f"{pair}: {word}"
                assert rank["loss"] == pytest.approx(expected["loss"], rel=1e-12), pair  # summed by stage
