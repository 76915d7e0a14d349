"""The DeepSpeed file: reads it, and completes it from the YAML.

The YAML owns batch sizes, clipping, the optimiser and its schedule; the file owns ZeRO, offload, precision
and buckets. In the file, a value that the YAML owns may be missing or `"auto"`; any other value must
agree, which `megamoe.validation.deepspeed` checks.
"""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megamoe.config.schema import Precision, RunConfig
from megamoe.errors import UserError
from megamoe.io import parse_json, read_plain, reason
from megamoe.parallel.layout import Layout

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
DEVICES = ("none", "cpu", "nvme")
LARGEST_FILE = 1 << 20  # bytes
Section = Literal["offload_optimizer", "offload_param"]
OFFLOADS: tuple[Section, ...] = ("offload_optimizer", "offload_param")


@dataclass(frozen=True)
class Offload:
    """Where optimiser state and parameters are stored: none (the device), cpu or nvme."""

    optimizer: str = "none"
    parameters: str = "none"


def read_offload(content: dict[str, Any]) -> Offload:
    """Return the offload settings of a DeepSpeed file's content."""
    return Offload(offload_device(content, "offload_optimizer"), offload_device(content, "offload_param"))


def offload_device(content: dict[str, Any], section: Section) -> str:
    """Return none, cpu or nvme."""
    offload = content.get("zero_optimization", {}).get(section) or {}
    return offload.get("device", "none")


def read_deepspeed_config(path: str | None) -> dict[str, Any]:
    """Return the JSON of `parallel.deepspeed`; None is ZeRO 0 in fp32."""
    if path is None:
        return {}
    try:
        text = read_plain(Path(path), LARGEST_FILE)
    except (OSError, ValueError) as error:
        raise UserError(f"parallel.deepspeed: cannot read {path!r}: {reason(error)}") from None
    try:
        content = parse_json(text, unique=True)
    except ValueError as error:
        raise UserError(f"parallel.deepspeed: {path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"parallel.deepspeed: {path} must hold a JSON object")
    for section in SECTIONS:
        if not isinstance(content.get(section, {}), dict):
            raise UserError(f"{path}: {section} is {short(content[section])}, expected an object")
    _check_stage_and_offload(path, content.get("zero_optimization", {}))
    for key in content:
        near = difflib.get_close_matches(key, NAMED, n=1, cutoff=0.8) if key not in NAMED else []
        if near:  # DeepSpeed ignores what it does not know
            raise UserError(f"{path}: unknown key {short(key)}; did you mean {near[0]!r}?")
    if "bfloat16" in content:
        raise UserError(f"{path}: 'bfloat16' is DeepSpeed's old name of 'bf16'; write bf16 in its place")
    section = content.get("zero_optimization", {})
    # As DeepSpeed does: "auto", which other trainers fill in, is its default.
    content |= {"zero_optimization": {k: v for k, v in section.items() if v != "auto"}} if section else {}
    return content


def _check_stage_and_offload(where: str, section: dict[str, Any]) -> None:
    """Check the types before DeepSpeed reads the section: it would accept 1.0 and true as a stage."""
    stage = section.get("stage", 0)
    if type(stage) is not int or stage not in STAGES:
        raise UserError(f"{where}: zero_optimization.stage is {short(stage)}, expected 0, 1, 2 or 3")
    for key in OFFLOADS:
        offload = section.get(key)
        if offload is None:
            continue
        if not isinstance(offload, dict):
            raise UserError(
                f'{where}: zero_optimization.{key} is {short(offload)}, expected such as {{"device": "cpu"}}'
            )
        device = offload.get("device", "none")
        if device not in DEVICES:
            raise UserError(
                f"{where}: zero_optimization.{key}.device is {short(device)}, expected none, cpu or nvme"
            )


def short(value: Any) -> str:
    """Return a value as Python writes it, shortened."""
    return value_text if len(value_text := repr(value)) <= 60 else f"{value_text[:60]}..."


def zero_stage(content: dict[str, Any]) -> int:
    """Return the ZeRO stage; 0 if the file has none."""
    return content.get("zero_optimization", {}).get("stage", 0)


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
                f"parallel.precision: found {asked}, but {where} says {name}.enabled: {str(value).lower()}; "
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
        from megamoe.parallel.exchange import with_nodes  # which imports torch

        precision, offload = resolve_precision(config, content), read_offload(content)
        layout = with_nodes(config, Layout.of(config.parallel, ranks))
        return cls(layout, zero_stage(content), precision, offload, json.dumps(content))

    @property
    def content(self) -> dict[str, Any]:
        """Return the content of the DeepSpeed file, a new copy each time."""
        return json.loads(self.deepspeed_json)


def resolve_parallel(config: RunConfig, ranks: int) -> ParallelPlan:
    """Read the DeepSpeed file and return the plan of the run.

    Raises:
        UserError: if the file cannot be read, or disagrees with `parallel.precision`.
    """
    return ParallelPlan.of(config, ranks, read_deepspeed_config(config.parallel.deepspeed))


def owned_values(
    config: RunConfig, plan: ParallelPlan, accumulation: int | None
) -> dict[str, tuple[float, str]]:
    """Return (value, key of the YAML) of each key of the DeepSpeed file that the YAML owns.

    accumulation: micro batches per rank of the first step; None: unknown, which leaves out what follows.
    """
    micro = config.train.micro_batch_size
    owned: dict[str, tuple[float, str]] = {
        "train_micro_batch_size_per_gpu": (micro, "train.micro_batch_size"),
        "gradient_clipping": (config.optimizer.grad_clip, "optimizer.grad_clip"),
    }
    if accumulation is not None:
        size = micro * accumulation * plan.layout.data
        owned["gradient_accumulation_steps"] = accumulation, "train.global_batch_size"
        owned["train_batch_size"] = size, "train.global_batch_size"
    return owned


def fill_in(config: RunConfig, plan: ParallelPlan, accumulation: int) -> dict[str, Any]:
    """Return the dictionary for `deepspeed.initialize`; `megamoe.validation.deepspeed` has checked the file.

    accumulation: micro batches per rank of the first step.
    """
    stage, filled = plan.stage, plan.content
    filled |= {key: value for key, (value, _) in owned_values(config, plan, accumulation).items()}
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
    return filled


def bucket_elements(plan: ParallelPlan) -> float:
    """Return the size of the gradient reduction buffer in elements, or 0 if the file has none."""
    size = plan.content.get("zero_optimization", {}).get("reduce_bucket_size", 0)
    return float(size) if isinstance(size, int | float) and plan.stage else 0.0


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
