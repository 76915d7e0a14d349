"""The DeepSpeed file against the YAML and DeepSpeed itself: every contradiction, with the file as its key."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megamoe.errors import Problem, UserError
from megamoe.optim.schedule import BatchSchedule
from megamoe.parallel.zero.deepspeed_config import ParallelPlan, read_deepspeed_config
from megamoe.validation.deepspeed import deepspeed_problems
from tests.support.ranks.fp16 import with_fp16
from tests.support.refusals import Case, cases
from tests.support.tiny import tiny


def problems_of(content: dict[str, Any]) -> list[Problem]:
    """On 4 ranks, with micro batches of 2, 24 samples a step and clipping at 0.5."""
    config = tiny("parallel.deepspeed=ds.json", "train.global_batch_size=24", "optimizer.grad_clip=0.5")
    schedule = BatchSchedule.from_config(config.train, 4)
    try:
        return list(deepspeed_problems(config, ParallelPlan.of(config, 4, content), schedule))
    except UserError as error:  # there is no plan
        return [Problem.of(error)]


@pytest.mark.parametrize("case", cases("deepspeed"))
def test_contradictions_are_refused(case: Case, expect_message: Callable[..., None]) -> None:
    with with_fp16(supported=False):
        expect_message(case, [str(problem) for problem in problems_of(case["content"])])


def test_each_contradiction_is_told() -> None:
    """Unless there is no batch to compare with; what DeepSpeed refuses is asked when all else is right."""
    zero = {
        "stage": 2,
        "compute_grad_norm": False,
        "reduce_buket_size": 1,
        "offload_param": {"device": "cpu"},
    }
    found = problems_of({"zero_optimization": zero, "train_batch_size": 8, "scheduler": {}, "elasticity": {}})
    words = ["reduce_buket_size", "compute_grad_norm", "at stage 2", "without offload_optimizer"]
    words += ["'scheduler'", "'elasticity'", "train_batch_size"]
    assert [word for word in words if any(word in each.message for each in found)] == words
    assert len(found) == len(words)


def test_what_deepspeed_refuses_itself_is_told_without_a_traceback() -> None:
    (found,) = problems_of({"wall_clock_breakdown": True, "communication_data_type": "fp99"})
    assert found.key == "ds.json" and "DeepSpeed refuses it: " in found.message


def test_what_other_trainers_fill_in_is_the_default(tmp_path: Path) -> None:
    """DeepSpeed drops "auto", and so must what reads the section beside it."""
    path = tmp_path / "ds.json"
    section = {"stage": 1, "overlap_comm": "auto", "reduce_bucket_size": "auto", "contiguous_gradients": True}
    path.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": section}))
    kept = {"stage": 1, "contiguous_gradients": True}
    assert read_deepspeed_config(str(path)) == {"bf16": {"enabled": True}, "zero_optimization": kept}
    path.write_text(json.dumps({"bfloat16": {"enabled": True}}))
    with pytest.raises(UserError, match="'bfloat16' is DeepSpeed's old name of 'bf16'; write bf16"):
        read_deepspeed_config(str(path))
