"""The DeepSpeed file: reads it, completes it from the YAML, and checks that they agree.

The YAML owns batch sizes, clipping, the optimiser and its schedule; the file owns ZeRO, offload, precision
and buckets. In the file, a value that the YAML owns may be missing or `"auto"`; any other value must agree.
"""

import copy
import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megamoe.config.schema import Precision, RunConfig
from megamoe.errors import UserError
from megamoe.io import read_plain, reason
from megamoe.optim.groups import check_adam
from megamoe.parallel.layout import Layout
from megamoe.parallel.zero.offload import Offload, check_offload, read_offload
from megamoe.registry import unknown_name_message

OF_THE_YAML = {
    "optimizer": "optimizer",
    "scheduler": "optimizer.schedule",
    "tensor_parallel": "parallel.tensor",
    "sequence_parallel_size": "parallel.sequence",
    "expert_parallel": "parallel.expert",
    "torch_autocast": "parallel.precision",
    "amp": "parallel.precision",
    "activation_checkpointing": "model.recompute",
    "flops_profiler": "train.profiler",
    "csv_monitor": "log",
    "tensorboard": "log.tensorboard",
    "wandb": "log.wandb",
    "comet": "log",
    "checkpoint": "checkpoint",
}
# Features of DeepSpeed that replace the model, the data, the loss or the ranks: nothing is made for them.
UNSUPPORTED = (
    *("autotuning", "compression_training", "curriculum_learning", "data_efficiency"),
    *("eigenvalue", "elasticity", "hybrid_engine", "nebula", "pipeline", "progressive_layer_drop"),
    *("quantize_training", "sparse_attention", "weight_quantization"),
)
SECTIONS = ("zero_optimization", "bf16", "fp16", "data_types", "aio")
OWNED = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
    "gradient_clipping",
)
NAMED = (*SECTIONS, *OF_THE_YAML, *UNSUPPORTED, *OWNED)
STAGES = (0, 1, 2, 3)
OFFLOADS = ("offload_optimizer", "offload_param")
DEVICES = ("none", "cpu", "nvme")
LARGEST_FILE = 1 << 20  # bytes
PRECISIONS = ("fp32", "bf16", "fp16")
LARGEST_SCALE_POWER = 64  # fp16 itself ends at 2 ** 16


def read_deepspeed_config(path: str | None) -> dict[str, Any]:
    """Return the JSON of `parallel.deepspeed`; None is ZeRO 0 in fp32."""
    if path is None:
        return {}
    try:
        content = json.loads(
            read_plain(Path(path), LARGEST_FILE).decode("utf-8"), object_pairs_hook=_without_repeats
        )
    except json.JSONDecodeError as error:
        raise UserError(f"parallel.deepspeed: {path} is not valid JSON: {error}") from None
    except UnicodeDecodeError:
        raise UserError(f"parallel.deepspeed: {path} is not valid JSON: not UTF-8 text") from None
    except _RepeatedKeyError as error:
        raise UserError(f"parallel.deepspeed: {path}: the key {error} stands twice") from None
    except RecursionError:
        raise UserError(f"parallel.deepspeed: {path} is not valid JSON: nested too deeply") from None
    except (OSError, ValueError) as error:
        raise UserError(f"parallel.deepspeed: cannot read {path!r}: {reason(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"parallel.deepspeed: {path} must hold a JSON object")
    for section in SECTIONS:
        if not isinstance(content.get(section, {}), dict):
            raise UserError(f"{path}: {section} is {_short(content[section])}, expected an object")
    _check_stage_and_offload(path, content.get("zero_optimization", {}))
    for key in content:
        near = difflib.get_close_matches(key, NAMED, n=1, cutoff=0.8) if key not in NAMED else []
        if near:  # DeepSpeed ignores what it does not know
            raise UserError(f"{path}: unknown key {_short(key)}; did you mean {near[0]!r}?")
    return content


class _RepeatedKeyError(Exception):
    """A key occurs twice; the message is its name."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedKeyError(_short(next(name for name in names if names.count(name) > 1)))
    return found


def _check_stage_and_offload(where: str, section: dict[str, Any]) -> None:
    """Check the types before DeepSpeed reads the section: it would accept 1.0 and true as a stage."""
    stage = section.get("stage", 0)
    if type(stage) is not int or stage not in STAGES:
        raise UserError(f"{where}: zero_optimization.stage is {_short(stage)}, expected 0, 1, 2 or 3")
    for key in OFFLOADS:
        offload = section.get(key)
        if offload is None:
            continue
        if not isinstance(offload, dict):
            raise UserError(
                f"{where}: zero_optimization.{key} is {_short(offload)}, expected an object, such as "
                '{"device": "cpu"}'
            )
        device = offload.get("device", "none")
        if device not in DEVICES:
            raise UserError(
                f"{where}: zero_optimization.{key}.device is {_short(device)}, expected "
                "'none', 'cpu' or 'nvme'"
            )


def _short(value: Any) -> str:
    return value_text if len(value_text := repr(value)) <= 60 else f"{value_text[:60]}..."


def zero_stage(content: dict[str, Any]) -> int:
    """Return the ZeRO stage; 0 if the file has none."""
    stage: int = content.get("zero_optimization", {}).get("stage", 0)
    return stage


def resolve_precision(config: RunConfig, content: dict[str, Any]) -> Precision:
    """Return fp32, bf16 or fp16, from the YAML and the file.

    Raises:
        UserError: if they disagree.
    """
    where = config.parallel.deepspeed or "the DeepSpeed file"
    stated = {name: content.get(name, {}).get("enabled", "auto") for name in ("bf16", "fp16")}
    for name, value in stated.items():
        if not (value == "auto" or isinstance(value, bool)):
            raise UserError(f'{where}: {name}.enabled is {value!r}, expected true, false or "auto"')
    enabled: list[Precision] = [name for name in ("bf16", "fp16") if stated[name] is True]
    if len(enabled) == 2:
        raise UserError(f"{where}: bf16.enabled and fp16.enabled are both true; switch one of them off")
    asked = config.parallel.precision
    if asked == "auto":
        return enabled[0] if enabled else "fp32"
    for name, value in stated.items():
        if value is (asked != name):
            raise UserError(
                f"parallel.precision is {asked}, but {where} says {name}.enabled: {str(value).lower()}; "
                "change one of them, or set parallel.precision: auto"
            )
    return asked


@dataclass(frozen=True)
class ParallelPlan:
    """The layout and the ZeRO settings of a run on a given number of ranks.

    Args:
        layout: the layout of the ranks, not yet checked.
        stage: the ZeRO stage from the file.
        precision: of the weights that the model computes with.
        offload: where optimizer state and parameters are stored.
        deepspeed_json: the file's content as JSON text, which is immutable.
    """

    layout: Layout
    stage: int
    precision: Precision
    offload: Offload
    deepspeed_json: str

    @classmethod
    def of(cls, config: RunConfig, ranks: int, content: dict[str, Any]) -> "ParallelPlan":
        """Return the plan for a file's content.

        Raises:
            UserError: if the file and `parallel.precision` disagree.
        """
        precision, offload = resolve_precision(config, content), read_offload(content)
        layout = Layout.of(config.parallel, ranks)
        return cls(layout, zero_stage(content), precision, offload, json.dumps(content))

    @property
    def content(self) -> dict[str, Any]:
        """Return the content of the DeepSpeed file, a new copy each time."""
        content: dict[str, Any] = json.loads(self.deepspeed_json)
        return content


def resolve_parallel(config: RunConfig, ranks: int) -> ParallelPlan:
    """Read the DeepSpeed file and return the plan of the run.

    Raises:
        UserError: if the file cannot be read, or disagrees with `parallel.precision`.
    """
    return ParallelPlan.of(config, ranks, read_deepspeed_config(config.parallel.deepspeed))


def fill_in(config: RunConfig, plan: ParallelPlan, accumulation: int) -> dict[str, Any]:
    """Return the dictionary for `deepspeed.initialize`.

    accumulation: micro batches per rank of the first step.

    Raises:
        UserError: naming the key, if the file disagrees with the YAML or holds what the YAML owns.
    """
    where = config.parallel.deepspeed or "the DeepSpeed file"
    stage, content = plan.stage, plan.content
    _check_stage_and_offload(where, content.get("zero_optimization", {}))
    _check_zero(where, content.get("zero_optimization", {}), stage)
    _check_overflow_checks(where, content)
    _check_numbers(where, content)
    check_offload(where, content, stage)
    check_adam(where, content.get("zero_optimization", {}), config.optimizer)
    for section, owner in OF_THE_YAML.items():
        if section in content:
            raise UserError(f"{where}: remove {section!r}; the YAML's {owner} decides that")
    for section in UNSUPPORTED:
        if section in content:
            raise UserError(f"{where}: remove {section!r}; megamoe does not support it")
    micro = config.train.micro_batch_size
    owned = {
        "train_micro_batch_size_per_gpu": (micro, "train.micro_batch_size"),
        "gradient_accumulation_steps": (accumulation, "train.global_batch_size"),
        "train_batch_size": (micro * accumulation * plan.layout.data, "train.global_batch_size"),
        "gradient_clipping": (config.optimizer.grad_clip, "optimizer.grad_clip"),
    }
    filled = plan.content
    for key, (value, owner) in owned.items():
        stated = filled.get(key, "auto")
        if stated not in ("auto", value):
            raise UserError(
                f"{where}: {key} is {stated}, but the YAML's {owner} makes it {value}; "
                f'set it to "auto" or change the YAML'
            )
        filled[key] = value
    _check_precision(where, plan.precision, stage)
    _set_precision(filled, plan.precision, stage)
    if stage == 0:
        filled["gradient_clipping"] = 0.0  # our optimiser clips: DeepSpeed's is wrong with experts there
    filled["train_batch_size"] *= plan.layout.context  # DeepSpeed counts all ranks with the same weights
    if plan.layout.pipeline > 1 and "zero_optimization" in filled and stage < 2:
        filled["zero_optimization"]["overlap_comm"] = False  # tied weights are summed before
    filled.setdefault("zero_allow_untested_optimizer", True)
    filled.setdefault("steps_per_print", 10**9)
    # DeepSpeed's timer of the throughput waits for the device at every micro batch; the trainer has its own.
    filled.setdefault("timers", {"throughput": {"enabled": False}})
    if plan.offload.optimizer != "none":
        filled.setdefault("zero_force_ds_cpu_optimizer", False)
    _check_the_rest(where, filled)
    return filled


def _check_zero(where: str, section: dict[str, Any], stage: int) -> None:
    """Check that the keys are DeepSpeed's and that experts support them."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**section)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(["zero_optimization", *map(str, first["loc"])])
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            known = list(DeepSpeedZeroConfig.model_fields)
            problem = unknown_name_message("key", str(first["loc"][0]), known)
            raise UserError(f"{where}: zero_optimization: {problem}") from None
        raise UserError(f"{where}: {key} is {first['input']!r}: {first['msg']}") from None
    bucket = section.get("allgather_bucket_size", 0)
    if stage in (1, 2) and bucket % 2:
        raise UserError(
            f"{where}: zero_optimization.allgather_bucket_size is {bucket!r}, expected an even number"
        )
    for key, without in (("zero_quantized_gradients", False), ("zero_hpz_partition_size", 1)):
        value = section.get(key, without)
        if stage == 3 and value != without:
            raise UserError(
                f"{where}: zero_optimization.{key} is {value!r}, which DeepSpeed does not do with experts; "
                "leave it out"
            )


def _check_numbers(where: str, content: dict[str, Any]) -> None:
    """Check numbers that DeepSpeed does not check: it would compute 2 to any power, and divide by text."""
    power = content.get("fp16", {}).get("initial_scale_power", 16)
    if type(power) is not int or not 0 <= power <= LARGEST_SCALE_POWER:
        raise UserError(
            f"{where}: fp16.initial_scale_power is {_short(power)}, expected a whole number from 0 to "
            f"{LARGEST_SCALE_POWER}"
        )
    every = content.get("steps_per_print", 1)
    if type(every) is not int or every < 1:
        raise UserError(f"{where}: steps_per_print is {_short(every)}, expected a whole number above 0")
    dtype = content.get("data_types", {}).get("grad_accum_dtype")
    if dtype not in (None, *PRECISIONS):
        raise UserError(
            f"{where}: data_types.grad_accum_dtype is {_short(dtype)}, expected 'fp32', 'bf16' or 'fp16'"
        )


def _check_the_rest(where: str, filled: dict[str, Any]) -> None:
    """Check what DeepSpeed would refuse with a traceback when its engine is built."""
    from deepspeed.runtime.config import DeepSpeedConfig

    # Without the batch size, which DeepSpeed checks against the ranks: they may not be initialised yet.
    rest = {key: value for key, value in copy.deepcopy(filled).items() if key != "train_batch_size"}
    try:
        DeepSpeedConfig(rest)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "a key"
        found = f"{first['msg']} (found {_short(first['input'])})"
        raise UserError(f"{where}: {error.title}: {key}: {found}") from None
    except Exception as error:  # DeepSpeed raises many types, such as AssertionError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{where}: DeepSpeed refuses it: {reason[:200]}") from None


def bucket_elements(plan: ParallelPlan) -> float:
    """Return the size of the gradient reduction buffer in elements, or 0 if the file has none."""
    size = plan.content.get("zero_optimization", {}).get("reduce_bucket_size", 0)
    return float(size) if isinstance(size, int | float) and plan.stage else 0.0


def _check_overflow_checks(where: str, content: dict[str, Any]) -> None:
    """Refuse to disable the checks by which DeepSpeed skips a step with gradients that are not finite."""
    for section, key in (("zero_optimization", "compute_grad_norm"), ("bf16", "check_grad_overflow")):
        if content.get(section, {}).get(key, True) is not True:
            raise UserError(
                f"{where}: {section}.{key} is {content[section][key]!r}, so a broken gradient would reach "
                "the weights; leave it out"
            )


def _check_precision(where: str, precision: Precision, stage: int) -> None:
    """Check that fp16 has ZeRO, whose optimiser scales the loss, and a device that computes in fp16."""
    if precision != "fp16":
        return
    from deepspeed.accelerator import get_accelerator

    if stage == 0:
        raise UserError(
            f"{where}: fp16 at zero_optimization.stage 0 has no fp32 masters; set the stage to 1, or use bf16"
        )
    if not get_accelerator().is_fp16_supported():
        raise UserError(
            f"{where}: fp16 needs a device that computes in it, and by DeepSpeed the accelerator "
            f"{get_accelerator().device_name()!r} here does not; use bf16 or fp32 "
            "(ds_configs/zero*_bf16.json, zero*_fp32.json)"
        )


def _set_precision(filled: dict[str, Any], precision: Precision, stage: int) -> None:
    """Accumulate gradients in fp32; at stage 0 we hold the bf16 model and its masters, not the engine."""
    for name in ("bf16", "fp16"):
        filled[name] = {**filled.get(name, {}), "enabled": precision == name and stage > 0}
    if filled["bf16"]["enabled"] or filled["fp16"]["enabled"]:
        types = filled.setdefault("data_types", {})
        types.setdefault("grad_accum_dtype", "fp32")
        # Stage 1 reduces accumulated gradients once a step; rounding them would lose the fp32 accumulation.
        if stage == 1:
            filled.setdefault("communication_data_type", "fp32")
            filled["bf16"].setdefault("immediate_grad_update", True)  # autograd's own go at once
    else:
        filled.pop("data_types", None)
