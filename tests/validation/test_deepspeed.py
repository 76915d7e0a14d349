"""The DeepSpeed file against the YAML and DeepSpeed itself: every contradiction, with the file as its key."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megamoe.errors import Problem, UserError
from megamoe.optim.schedule import BatchSchedule
from megamoe.parallel.zero.deepspeed_config import ParallelPlan, read_deepspeed_config
from megamoe.validation.deepspeed import deepspeed_problems
from tests.support.ranks.fp16 import with_fp16
from tests.support.tiny import tiny

CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "micro batch": (
        {"train_micro_batch_size_per_gpu": 4},
        r"train_micro_batch_size_per_gpu is 4, but the YAML's train.micro_batch_size makes it 2; set it to "
        '"auto" or change the YAML',
    ),
    "an unknown key": (
        {"zero_optimization": {"stage": 1, "reduce_buket_size": 1}},
        "zero_optimization: unknown key 'reduce_buket_size'; did you mean 'reduce_bucket_size'",
    ),
    "a wrong value": (
        {"zero_optimization": {"stage": 1, "reduce_bucket_size": "big"}},
        "zero_optimization.reduce_bucket_size is 'big': ",
    ),
    "NVMe": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "x"}}},
        "offload_optimizer.device is 'nvme' at stage 2; it needs stage 3",
    ),
    "offload at stage 0": (
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
        "offload_optimizer.device is 'cpu' at stage 0",
    ),
    "parameters offloaded": (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        "offload_param",
    ),
    "accumulation": (
        {"gradient_accumulation_steps": 1},
        "gradient_accumulation_steps is 1, .* train.global_batch_size makes it 3",
    ),
    "batch": ({"train_batch_size": 32}, "train_batch_size is 32, .* train.global_batch_size makes it 24"),
    "clipping": (
        {"zero_optimization": {"stage": 1}, "gradient_clipping": 1.0},
        "gradient_clipping is 1.0, .* optimizer.grad_clip makes it 0.5",
    ),
    "optimizer": ({"optimizer": {"type": "Adam"}}, "remove 'optimizer'; the YAML's optimizer decides that"),
    "tensor parallelism": (
        {"tensor_parallel": {"autotp_size": 2}},
        "remove 'tensor_parallel'; the YAML's parallel.tensor decides that",
    ),
    "autocast": (
        {"torch_autocast": {"enabled": True}},
        "remove 'torch_autocast'; the YAML's parallel.precision",
    ),
    "profiler": ({"flops_profiler": {"enabled": True}}, "remove 'flops_profiler'; the YAML's train.profiler"),
    "monitor": ({"csv_monitor": {"enabled": True}}, "remove 'csv_monitor'; the YAML's log decides that"),
    "feature": ({"elasticity": {"enabled": True}}, "remove 'elasticity'; megamoe does not support it"),
    "scheduler": ({"scheduler": {"type": "WarmupLR"}}, "remove 'scheduler'; the YAML's optimizer.schedule"),
    "parameters alone offloaded": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        "offload_param.device is 'cpu' without offload_optimizer",
    ),
    "NVMe without a path": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
        "offload_optimizer.nvme_path is missing",
    ),
    "NVMe nowhere": (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/no/where"},
            }
        },
        "nvme_path: /no/where is no folder that this user can write in",
    ),
    "NVMe at a number": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": 5}}},
        "nvme_path is 5: Input is not a valid path",
    ),
    "a bucket in quotation marks": (
        {"zero_optimization": {"stage": 1, "allgather_bucket_size": "500000000"}},
        "allgather_bucket_size is '500000000', expected 500000000 without quotation marks",
    ),
    "a truth value in quotation marks": (
        {"zero_optimization": {"stage": 1, "overlap_comm": "no"}},
        "overlap_comm is 'no', expected false without quotation marks",
    ),
    "a share in quotation marks": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": "0.5"}}},
        "offload_optimizer.ratio is '0.5', expected 0.5 without quotation marks",
    ),
    "a part of the optimizer on the CPU": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        "ratio is 0.5, with which DeepSpeed steps a part of the weights .*; leave ratio out",
    ),
    "an optimizer in another process": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
        "offload_optimizer.super_offload is True, with which DeepSpeed steps a part of the weights",
    ),
    "offload by an old key": (
        {"zero_optimization": {"stage": 2, "cpu_offload": True}},
        'zero_optimization.cpu_offload is DeepSpeed\'s old key; write "offload_optimizer": {"device": "cpu"}',
    ),
    "a sum of gradients": (
        {"gradient_allreduce_op": "sum"},
        "gradient_allreduce_op is 'sum', expected 'mean', for which the loss is scaled",
    ),
    "hierarchical partitions": (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
        "zero_hpz_partition_size is 2, which DeepSpeed does not do with experts",
    ),
    "no gradient norm": (
        {"zero_optimization": {"stage": 2, "compute_grad_norm": False}},
        "zero_optimization.compute_grad_norm is False, so a broken gradient would reach the weights",
    ),
    "no check of gradients": (
        {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True, "check_grad_overflow": False}},
        "bf16.check_grad_overflow is False, so a broken gradient would reach the weights",
    ),
    "fp16 at stage 0": ({"fp16": {"enabled": True}}, "fp16 at zero_optimization.stage 0 has no fp32 masters"),
    "both precisions": (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "bf16.enabled and fp16.enabled are both true",
    ),
    "fp16 where nothing computes in it": (
        {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}},
        "fp16 needs a device that computes in it, and by DeepSpeed the accelerator 'cpu' here does not; use",
    ),
    "bf16 in words": (
        {"bf16": {"enabled": "yes"}},
        "bf16.enabled is 'yes', expected true, false or \"auto\"",
    ),
}


def problems_of(content: dict[str, Any]) -> list[Problem]:
    """On 4 ranks, with micro batches of 2, 24 samples a step and clipping at 0.5."""
    config = tiny("parallel.deepspeed=ds.json", "train.global_batch_size=24", "optimizer.grad_clip=0.5")
    schedule = BatchSchedule.from_config(config.train, 4)
    try:
        return list(deepspeed_problems(config, ParallelPlan.of(config, 4, content), schedule))
    except UserError as error:  # there is no plan
        return [Problem.of(error)]


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_refused(case: str) -> None:
    content, reason = CONTRADICTIONS[case]
    with with_fp16(supported=False):
        found = problems_of(content)[0]
    assert found.key == "ds.json" and re.search(reason, found.message), found


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
