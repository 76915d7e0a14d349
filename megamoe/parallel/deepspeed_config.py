"""The DeepSpeed file: read, filled in from the YAML, and held against it.

The YAML owns batch sizes, clipping, the optimiser and its schedule; the file owns ZeRO, offload, precision
and buckets. A value of the file that the YAML owns may be left out or `"auto"`; another one must agree.
"""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from megamoe.config.schema import RunConfig
from megamoe.errors import UserError

Precision = Literal["fp32", "bf16"]
SECTIONS = ("zero_optimization", "bf16", "fp16", "data_types")


def read_deepspeed_config(path: str | None) -> dict[str, Any]:
    """The JSON of `parallel.deepspeed`; None is ZeRO 0 in fp32."""
    if path is None:
        return {}
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"parallel.deepspeed: cannot read {path!r}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"parallel.deepspeed: {path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"parallel.deepspeed: {path} must hold a JSON object")
    for section in SECTIONS:
        if not isinstance(content.get(section, {}), dict):
            raise UserError(f"{path}: {section} is {content[section]!r}, expected an object")
    return content


def zero_stage(content: dict[str, Any]) -> int:
    """The ZeRO stage, 0 where the file says nothing."""
    stage: int = content.get("zero_optimization", {}).get("stage", 0)
    return stage


def offloads_optimizer(content: dict[str, Any]) -> bool:
    """Whether the optimiser's state lives on the CPU."""
    offload = content.get("zero_optimization", {}).get("offload_optimizer") or {}
    return bool(offload.get("device") == "cpu")


def resolve_precision(config: RunConfig, content: dict[str, Any]) -> Precision:
    """fp32 or bf16, from the YAML and the file together.

    Raises:
        UserError: where they disagree, and for fp16.
    """
    where = config.parallel.deepspeed or "the DeepSpeed file"
    if content.get("fp16", {}).get("enabled") is True:
        raise UserError(f"{where}: fp16.enabled is true, but fp16 is not supported; use bf16 or fp32")
    stated = content.get("bf16", {}).get("enabled", "auto")
    if stated not in ("auto", True, False):
        raise UserError(f'{where}: bf16.enabled is {stated!r}, expected true, false or "auto"')
    asked = config.parallel.precision
    if stated == "auto":
        return "bf16" if asked == "bf16" else "fp32"
    in_file: Precision = "bf16" if stated else "fp32"
    if asked not in ("auto", in_file):
        raise UserError(
            f"parallel.precision is {asked}, but {where} says bf16.enabled: {str(stated).lower()}; "
            "change one of them, or set parallel.precision: auto"
        )
    return in_file


def fill_in(
    config: RunConfig, content: dict[str, Any], data_parallel: int, accumulation: int
) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize`.

    Raises:
        UserError: naming the key, where the file contradicts the YAML, or holds what the YAML owns.
    """
    where = config.parallel.deepspeed or "the DeepSpeed file"
    stage = zero_stage(content)
    if stage not in (0, 1, 2, 3):
        raise UserError(f"{where}: zero_optimization.stage is {stage!r}, expected 0, 1, 2 or 3")
    _check_zero(where, content.get("zero_optimization", {}), stage)
    for section, owner in (("optimizer", "optimizer"), ("scheduler", "optimizer.schedule")):
        if section in content:
            raise UserError(f"{where}: remove {section!r}; the YAML's {owner} decides that")
    micro = config.train.micro_batch_size
    owned = {
        "train_micro_batch_size_per_gpu": (micro, "train.micro_batch_size"),
        "gradient_accumulation_steps": (accumulation, "train.global_batch_size"),
        "train_batch_size": (micro * accumulation * data_parallel, "train.global_batch_size"),
        "gradient_clipping": (config.optimizer.grad_clip, "optimizer.grad_clip"),
    }
    filled = json.loads(json.dumps(content))
    for key, (value, owner) in owned.items():
        stated = filled.get(key, "auto")
        if stated not in ("auto", value):
            raise UserError(
                f"{where}: {key} is {stated}, but the YAML's {owner} makes it {value}; "
                f'set it to "auto" or change the YAML'
            )
        filled[key] = value
    _set_precision(filled, resolve_precision(config, content), stage)
    if stage == 0:
        filled["gradient_clipping"] = 0.0  # our optimiser clips: DeepSpeed's is wrong with experts there
    filled.setdefault("zero_allow_untested_optimizer", True)
    filled.setdefault("steps_per_print", 10**9)
    if offloads_optimizer(filled):
        filled.setdefault("zero_force_ds_cpu_optimizer", False)
    return filled


def _check_zero(where: str, section: dict[str, Any], stage: int) -> None:
    """The keys are DeepSpeed's; what is offloaded must be what we can."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**section)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(["zero_optimization", *map(str, first["loc"])])
        raise UserError(f"{where}: {key} is {first['input']!r}: {first['msg']}") from None
    device = (section.get("offload_optimizer") or {}).get("device", "none")
    if device not in ("none", "cpu") or (device == "cpu" and stage == 0):
        raise UserError(
            f"{where}: zero_optimization.offload_optimizer.device is {device!r} at stage {stage}; "
            "expected none, or cpu at stage 1 or 2"
        )
    if section.get("offload_param"):
        raise UserError(f"{where}: zero_optimization.offload_param needs stage 3, which is not supported yet")


def _set_precision(filled: dict[str, Any], precision: Precision, stage: int) -> None:
    """bf16 accumulates in fp32; at stage 0 the bf16 model and its masters are ours, not the engine's."""
    engine_bf16 = precision == "bf16" and stage > 0
    filled["bf16"] = {**filled.get("bf16", {}), "enabled": engine_bf16}
    if engine_bf16:
        types = filled.setdefault("data_types", {})
        types.setdefault("grad_accum_dtype", "fp32")
    else:
        filled.pop("data_types", None)
