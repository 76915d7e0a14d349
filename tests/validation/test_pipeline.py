"""Stages and parts of sequences that cannot be: refused by key, with the reason and the legal values."""

import pytest

from megamoe.errors import Problem
from megamoe.parallel.zero.deepspeed_config import resolve_parallel
from megamoe.validation.run import validate
from tests.support.ranks.runs import ds_config
from tests.support.tiny import tiny

FOUR = ("model.num_layers=4", "model.num_attention_heads=4", "train.global_batch_size=null")
TWO = (*FOUR, "parallel.pipeline=2")
UNTIED = "model.tie_embeddings=false"
# By what is wrong: the key, a part of the message, the ranks, and the overrides.
REFUSALS: dict[str, tuple[str, str, int, tuple[str, ...]]] = {
    "stages that do not divide": (
        "parallel.pipeline",
        "does not divide the number of ranks 4; legal on 4 ranks "
        "with tensor 1, expert 1, expert_tensor 1: 1, 2, 4",
        4,
        (*FOUR, "parallel.pipeline=3"),
    ),
    "experts over stages": (
        "parallel.expert",
        "does not divide the number of ranks of a pipeline stage 2",
        4,
        (*TWO, "parallel.expert=4"),
    ),
    "more stages than blocks": (
        "parallel.pipeline",
        "8 x pipeline_chunks 1 are more parts than model.num_layers 4",
        8,
        (*FOUR, "parallel.pipeline=8"),
    ),
    "more chunks than blocks": (
        "parallel.pipeline",
        "2 x pipeline_chunks 3",
        2,
        (*TWO, "parallel.pipeline_chunks=3"),
    ),
    "chunks without stages": (
        "parallel.pipeline_chunks",
        "2 needs parallel.pipeline above 1",
        1,
        (*FOUR, "parallel.pipeline_chunks=2"),
    ),
    "blocks without stages": (
        "parallel.blocks_per_stage",
        "needs parallel.pipeline above 1",
        1,
        (*FOUR, "parallel.blocks_per_stage=[4]"),
    ),
    "a list of the wrong length": (
        "parallel.blocks_per_stage",
        "[4] has 1 numbers with the sum 4, expected 2",
        2,
        (*TWO, "parallel.blocks_per_stage=[4]"),
    ),
    "a list with the wrong sum": (
        "parallel.blocks_per_stage",
        "with the sum 5, expected 2",
        2,
        (*TWO, "parallel.blocks_per_stage=[3,2]"),
    ),
    "unequal rounds": (
        "parallel.pipeline_chunks",
        "5 micro batches do not divide into 2 equal rounds over 2 "
        "stages; choose a multiple of 2, or fewer than 4",
        2,
        (*TWO, "parallel.pipeline_chunks=2", "train.micro_batch_size=1", "train.global_batch_size=5"),
    ),
    "a size within a growing batch": (
        "parallel.pipeline_chunks",
        "2: 5 micro batches do not divide into 2 equal rounds over 2 stages",
        2,
        (
            *TWO,
            "parallel.pipeline_chunks=2",
            "train.micro_batch_size=1",
            "train.global_batch_size=6",
            "train.batch_rampup={start: 4, increment: 1, samples: 100}",
        ),
    ),
    "ZeRO 3": (
        "parallel.pipeline",
        "legal stages: 0, 1, 2",
        2,
        (*TWO, f"parallel.deepspeed={ds_config('zero3_fp32')}"),
    ),
    "offload": (
        "parallel.pipeline",
        "with offloading",
        2,
        (*TWO, UNTIED, f"parallel.deepspeed={ds_config('zero2_bf16_offload')}"),
    ),
    "a tied embedding at ZeRO 2": (
        "parallel.pipeline",
        "with model.tie_embeddings is not possible at zero_optimization.stage 2",
        2,
        (*TWO, f"parallel.deepspeed={ds_config('zero2_fp32')}"),
    ),
    "multi-token prediction at ZeRO 2": (
        "parallel.pipeline",
        "with model.multi_token_prediction.depth",
        2,
        (
            *TWO,
            UNTIED,
            "model.multi_token_prediction.depth=1",
            f"parallel.deepspeed={ds_config('zero2_fp32')}",
        ),
    ),
    "an encoder": (
        "parallel.pipeline",
        "needs model.architecture decoder, found encoder",
        2,
        (*TWO, "model.architecture=encoder", "train.objective=masked"),
    ),
    "an encoder's sequences": (
        "parallel.context",
        "needs model.architecture decoder, found encoder",
        2,
        (*FOUR, "parallel.context=2", "model.architecture=encoder", "train.objective=masked"),
    ),
    "heads": (
        "parallel.context",
        "x tensor 1 = 4 does not divide model.num_attention_heads 2; legal with tensor 1: 1, 2",
        4,
        ("model.num_attention_heads=2", "parallel.context=4"),
    ),
    "lengths": (
        "parallel.context",
        "does not divide data.sequence_length 6",
        4,
        (*FOUR, "data.sequence_length=6", "parallel.context=4"),
    ),
    "parts that do not divide": (
        "parallel.context",
        "does not divide the number of ranks 2",
        2,
        (*FOUR, "parallel.context=4"),
    ),
}


def problems(ranks: int, *overrides: str) -> list[Problem]:
    config = tiny(*overrides)
    return list(validate(config, ranks, resolve_parallel(config, ranks)))


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    key, reason, ranks, overrides = REFUSALS[name]
    found = [str(problem) for problem in problems(ranks, *overrides)]
    assert any(line.startswith(f"{key}: ") and reason in line for line in found), found
    assert not any("\n" in line for line in found)


@pytest.mark.parametrize(
    "overrides",
    [
        TWO,
        (*TWO, "parallel.pipeline_chunks=2"),
        (*TWO, "parallel.blocks_per_stage=[3,1]"),
        (
            *TWO,
            "parallel.expert=2",
            f"parallel.deepspeed={ds_config('zero1_bf16')}",
            "moe.expert_ffn_hidden_size=16",
        ),
        (*TWO, "parallel.context=2"),
        (*FOUR, "parallel.context=4", "data.sequence_length=8"),
        (*FOUR, "parallel.context=2", "parallel.tensor=2", f"parallel.deepspeed={ds_config('zero3_fp32')}"),
        (*TWO, UNTIED, f"parallel.deepspeed={ds_config('zero2_fp32')}"),
    ],
)
def test_what_is_possible_on_four_ranks(overrides: tuple[str, ...]) -> None:
    assert problems(4, *overrides) == []
