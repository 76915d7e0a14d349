"""Checks of the DeepSpeed file against the YAML, and of what DeepSpeed itself would refuse too late."""

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megamoe.config.layer_kinds import kinds
from megamoe.config.schema import OptimizerConfig, RunConfig
from megamoe.errors import Problem
from megamoe.moe.capabilities import provides
from megamoe.optim.schedule import BatchSchedule
from megamoe.parallel.zero import deepspeed_config
from megamoe.parallel.zero.deepspeed_config import OFFLOADS, ParallelPlan, offload_device, short
from megamoe.registry import unknown_name_message

PRECISIONS = ("fp32", "bf16", "fp16")
LARGEST_SCALE_POWER = 64  # fp16 itself ends at 2 ** 16
RENAMED = {
    "cpu_offload": '"offload_optimizer": {"device": "cpu"}',
    "cpu_offload_param": '"offload_param": {"device": "cpu"}',
    "cpu_offload_use_pin_memory": '"pin_memory": true inside offload_optimizer and offload_param',
}
NOT_FINITE = "so a broken gradient would reach the weights"
WITH_EXPERTS = "which DeepSpeed does not do with experts"  # at ZeRO 3
# DeepSpeed's own AdamW gets no learning rate of a step, and its moments are in no checkpoint.
OF_ITS_OWN = (
    "with which DeepSpeed steps a part of the weights by an optimizer that has neither the schedule nor a "
    "place in checkpoints"
)
# The values that keys must have where they are given, and why no other.
FIXED: dict[tuple[str, ...], tuple[Any, str]] = {
    ("zero_optimization", "zero_quantized_gradients"): (False, WITH_EXPERTS),
    ("zero_optimization", "zero_hpz_partition_size"): (1, WITH_EXPERTS),
    ("zero_optimization", "compute_grad_norm"): (True, NOT_FINITE),
    ("bf16", "check_grad_overflow"): (True, NOT_FINITE),
    ("gradient_allreduce_op",): ("mean", "expected 'mean', for which the loss is scaled"),
    ("zero_optimization", "offload_optimizer", "ratio"): (1.0, OF_ITS_OWN),
    ("zero_optimization", "offload_optimizer", "super_offload"): (False, OF_ITS_OWN),
}
# The ZeRO stages that support each offload.
STAGES = {
    ("offload_optimizer", "cpu"): (1, 2, 3),
    ("offload_optimizer", "nvme"): (3,),
    ("offload_param", "cpu"): (3,),
    ("offload_param", "nvme"): (3,),
}


def deepspeed_problems(
    config: RunConfig, plan: ParallelPlan, schedule: BatchSchedule | None
) -> Iterator[Problem]:
    """Yield why the DeepSpeed file disagrees with the YAML, or holds what cannot be.

    schedule: of the batch size; None if there is none, because the batch sizes are wrong.
    """
    where = config.parallel.deepspeed or "the DeepSpeed file"
    content = plan.content
    reasons = list(_reasons(config, plan, content))
    accumulation = None if schedule is None else schedule.accumulation_at(0)
    for key, (value, owner) in deepspeed_config.owned_values(config, plan, accumulation).items():
        stated = content.get(key, "auto")
        if stated not in ("auto", value):
            reasons.append(f'{key} is {stated}, but the YAML\'s {owner} makes it {value}; set it to "auto"')
    if not reasons and accumulation is not None:
        reasons = list(_refusals_of_deepspeed(deepspeed_config.fill_in(config, plan, accumulation)))
    yield from (Problem(where, reason) for reason in reasons)


def _reasons(config: RunConfig, plan: ParallelPlan, content: dict[str, Any]) -> Iterator[str]:
    section = content.get("zero_optimization", {})
    yield from _of_zero(section)
    bucket = section.get("allgather_bucket_size", 0)  # which ranks share
    if plan.stage in (1, 2) and isinstance(bucket, int) and bucket % 2:
        yield f"zero_optimization.allgather_bucket_size is {bucket!r}, expected an even number"
    yield from _of_fixed(content, plan.stage)
    yield from _of_numbers(content)
    yield from _of_offload(section, plan.stage)
    yield from _of_moments(section, plan.stage, config.optimizer)
    yield from _of_muon(section, config.optimizer)
    yield from _of_mean(section, config.optimizer)
    for name, owner in deepspeed_config.OF_THE_YAML.items():
        if name in content:
            yield f"remove {name!r}; the YAML's {owner} decides that"
    for name in deepspeed_config.UNSUPPORTED:
        if name in content:
            yield f"remove {name!r}; megamoe does not support it"
    if plan.precision == "fp16":
        yield from _of_fp16(plan.stage)
    selectors = [kind.moe.router.selector for kind in kinds(config) if kind.layers]
    if plan.stage == 3 and any(provides("threshold_E", selector) for selector in selectors):
        yield "zero_optimization.stage 3 cuts the thresholds of selector strictly_balanced; set 1 or 2"


def _of_zero(section: dict[str, Any]) -> Iterator[str]:
    """Yield keys and values that are not DeepSpeed's."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        parsed = DeepSpeedZeroConfig(**section)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            if each["type"] == "extra_forbidden" and len(each["loc"]) == 1:
                known = list(DeepSpeedZeroConfig.model_fields)
                yield f"zero_optimization: {unknown_name_message('key', str(each['loc'][0]), known)}"
            else:
                key = ".".join(["zero_optimization", *map(str, each["loc"])])
                yield f"{key} is {each['input']!r}: {each['msg']}"
        return
    for key, now in RENAMED.items():
        if section.get(key):
            yield f"zero_optimization.{key} is DeepSpeed's old key; write {now} in its place"
    yield from _of_quoted("zero_optimization", section, parsed)
    for key in OFFLOADS:
        if section.get(key) is not None:
            yield from _of_quoted(f"zero_optimization.{key}", section[key], getattr(parsed, key))


def _of_quoted(where: str, section: dict[str, Any], parsed: Any) -> Iterator[str]:
    """Yield numbers and truth values that are texts: DeepSpeed converts some of them, and not everywhere."""
    for key, value in section.items():
        meant = getattr(parsed, key, None)
        if isinstance(value, str) and value != "auto" and isinstance(meant, int | float):
            yield f"{where}.{key} is {short(value)}, expected {json.dumps(meant)} without quotation marks"


def _of_fixed(content: dict[str, Any], stage: int) -> Iterator[str]:
    """Yield keys of `FIXED` with another value than the one that they must have."""
    for (*sections, key), (value, why) in FIXED.items():
        section = content
        for name in sections:
            section = section.get(name) or {}
        stated = section.get(key, value)
        if stated != value and (stage == 3 or why != WITH_EXPERTS):
            yield f"{'.'.join([*sections, key])} is {short(stated)}, {why}; leave it out"


def _of_numbers(content: dict[str, Any]) -> Iterator[str]:
    """Yield numbers that DeepSpeed does not check: it would compute 2 to any power, and divide by text."""
    power = content.get("fp16", {}).get("initial_scale_power", 16)
    if type(power) is not int or not 0 <= power <= LARGEST_SCALE_POWER:
        yield f"fp16.initial_scale_power is {short(power)}, expected 0 to {LARGEST_SCALE_POWER}"
    every = content.get("steps_per_print", 1)
    if type(every) is not int or every < 1:
        yield f"steps_per_print is {short(every)}, expected a whole number above 0"
    dtype = content.get("data_types", {}).get("grad_accum_dtype")
    if dtype not in (None, *PRECISIONS):
        yield f"data_types.grad_accum_dtype is {short(dtype)}, expected 'fp32', 'bf16' or 'fp16'"


def _of_offload(section: dict[str, Any], stage: int) -> Iterator[str]:
    """Yield offload that DeepSpeed would accept, or refuse only after building half of the model."""
    devices = {name: offload_device({"zero_optimization": section}, name) for name in OFFLOADS}
    for name, device in devices.items():
        if device == "none":
            continue
        stages = STAGES[name, device]
        if stage not in stages:
            yield (
                f"zero_optimization.{name}.device is {device!r} at stage {stage}; it needs stage "
                f"{' or '.join(map(str, stages))}"
            )
        elif device == "nvme":
            yield from _of_folder(f"zero_optimization.{name}.nvme_path", section[name].get("nvme_path"))
    if devices["offload_param"] != "none" and devices["offload_optimizer"] == "none":
        yield (
            f"zero_optimization.offload_param.device is {devices['offload_param']!r} without "
            "offload_optimizer; offload the optimiser too, to cpu or nvme"
        )
    if "nvme" in devices.values():
        yield from _of_async_io()


def _of_folder(key: str, path: Any) -> Iterator[str]:
    if path is None:
        yield f"{key} is missing, which device 'nvme' needs; name a folder on a local disk"
    elif isinstance(path, str) and not (Path(path).is_dir() and os.access(path, os.W_OK | os.X_OK)):
        yield f"{key}: {path} is no folder that this user can write in; make it on every machine"


def _of_async_io() -> Iterator[str]:
    """Yield why DeepSpeed's NVMe op cannot be compiled at its first use."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        yield (
            "offload to 'nvme' needs DeepSpeed's async_io op, which cannot be built here; install libaio "
            "with its headers (Debian: apt-get install libaio-dev) and ninja, or set device: cpu"
        )


def _of_moments(section: dict[str, Any], stage: int, config: OptimizerConfig) -> Iterator[str]:
    """Yield moments in bf16 where the optimiser is one that keeps them in fp32."""
    if config.moments == "fp32":
        return
    if config.name == "muon":
        yield "optimizer.moments: bf16 goes with optimizer.name adamw and adam; found muon"
    if stage == 0:
        yield "optimizer.moments: bf16 needs zero_optimization.stage 1, 2 or 3; set one, or moments: fp32"
    if offload_device({"zero_optimization": section}, "offload_optimizer") != "none":
        yield (
            "optimizer.moments: bf16 does not go with offload_optimizer, whose Adam has fp32; leave one out"
        )


def _of_muon(section: dict[str, Any], config: OptimizerConfig) -> Iterator[str]:
    """Yield what takes momentum and weights out of the reach of Muon's exchange between ranks."""
    if config.name != "muon":
        return
    offload = section.get("offload_optimizer") or {}
    if offload.get("device", "none") != "none":
        yield (
            f"zero_optimization.offload_optimizer.device is {offload['device']!r}, but optimizer.name: muon "
            "orthogonalises on the device; leave offload_optimizer out, or set optimizer.name: adamw"
        )
    if section.get("round_robin_gradients"):
        yield (
            "zero_optimization.round_robin_gradients is true, with which optimizer.name: muon would not know "
            "where a matrix lies; leave it out"
        )


def _of_mean(section: dict[str, Any], config: OptimizerConfig) -> Iterator[str]:
    """Yield where the masters lie on disk, on which no mean of them is kept."""
    offload = section.get("offload_optimizer") or {}
    if config.ema is not None and offload.get("device") == "nvme":
        yield (
            "zero_optimization.offload_optimizer.device is 'nvme', but optimizer.ema keeps a mean of the "
            "weights in memory; offload to 'cpu', or leave optimizer.ema out and average checkpoints"
        )


def _of_fp16(stage: int) -> Iterator[str]:
    """Yield what fp16 lacks: ZeRO, whose optimiser scales the loss, or a device that computes in fp16."""
    from deepspeed.accelerator import get_accelerator

    if stage == 0:
        yield "fp16 at zero_optimization.stage 0 has no fp32 masters; set the stage to 1, or use bf16"
    if not get_accelerator().is_fp16_supported():
        yield (
            "fp16 needs a device that computes in it, and by DeepSpeed the accelerator "
            f"{get_accelerator().device_name()!r} here does not; use bf16 or fp32 "
            "(ds_configs/zero*_bf16.json, zero*_fp32.json)"
        )


def _refusals_of_deepspeed(filled: dict[str, Any]) -> Iterator[str]:
    """Yield what DeepSpeed would refuse with a traceback when its engine is built."""
    from deepspeed.runtime.config import DeepSpeedConfig

    # Without the batch size, which DeepSpeed checks against the ranks: they may not be initialised yet.
    rest = {key: value for key, value in copy.deepcopy(filled).items() if key != "train_batch_size"}
    try:
        DeepSpeedConfig(rest)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            key = ".".join(map(str, each["loc"])) or "a key"
            yield f"{error.title}: {key}: {each['msg']} (found {short(each['input'])})"
    except Exception as error:  # DeepSpeed raises many types, such as AssertionError
        reason = " ".join(str(error).split()) or type(error).__name__
        yield f"DeepSpeed refuses it: {reason[:200]}"
