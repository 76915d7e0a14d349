"""The DeepSpeed file is read, and filled in where it is silent; tests/validation has what is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from megamoe.config import RunConfig
from megamoe.errors import UserError, raise_first
from megamoe.optim.schedule import BatchSchedule
from megamoe.parallel.zero.deepspeed_config import (
    ParallelPlan,
    fill_in,
    offload_device,
    read_deepspeed_config,
    resolve_precision,
    zero_stage,
)
from megamoe.validation import deepspeed
from megamoe.validation.deepspeed import deepspeed_problems
from tests.support.ranks.fp16 import with_fp16
from tests.support.tiny import tiny, tiny_engine

BATCH = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "train_batch_size": 24}
SHIPPED = sorted((Path(__file__).parents[3] / "ds_configs").glob("*.json"))


def run_of(precision: str = "auto") -> RunConfig:
    """Micro batches of 2; with 4 ranks and 3 micro batches each, 24 samples a step; clipping at 0.5."""
    return tiny(
        "parallel.deepspeed=ds.json",
        f"parallel.precision={precision}",
        "train.global_batch_size=24",
        "optimizer.grad_clip=0.5",
    )


def fill(content: dict[str, Any], precision: str = "auto") -> dict[str, Any]:
    before = copy.deepcopy(content)
    config = run_of(precision)
    plan = ParallelPlan.of(config, 4, content)
    raise_first(deepspeed_problems(config, plan, BatchSchedule.from_config(config.train, plan.layout.data)))
    filled = fill_in(config, plan, accumulation=3)
    assert content == before
    return filled


@pytest.mark.parametrize("stated", ["absent", "auto", "the same"])
def test_what_the_yaml_owns_is_filled_in(stated: str) -> None:
    owned = {**BATCH, "gradient_clipping": 0.5}
    content: dict[str, Any] = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}
    if stated != "absent":
        content |= {key: "auto" if stated == "auto" else value for key, value in owned.items()}
    filled = fill(content)
    assert {key: filled[key] for key in owned} == owned
    assert filled["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1000}


def test_at_stage_0_the_engine_does_not_clip() -> None:
    """Our optimiser does, but a limit of the file that differs from the YAML's is still a contradiction."""
    assert fill({"gradient_clipping": 0.5})["gradient_clipping"] == 0.0
    with pytest.raises(UserError, match="gradient_clipping is 1.0"):
        fill({"gradient_clipping": 1.0})


BF16_ON, BF16_OFF, BF16_AUTO = ({"bf16": {"enabled": enabled}} for enabled in (True, False, "auto"))


@pytest.mark.parametrize(
    ("content", "asked", "expected"),
    [
        ({}, "auto", "fp32"),
        ({}, "fp32", "fp32"),
        ({}, "bf16", "bf16"),
        (BF16_AUTO, "auto", "fp32"),
        (BF16_AUTO, "fp32", "fp32"),
        (BF16_AUTO, "bf16", "bf16"),
        (BF16_ON, "auto", "bf16"),
        (BF16_ON, "bf16", "bf16"),
        (BF16_ON, "fp32", None),
        (BF16_OFF, "auto", "fp32"),
        (BF16_OFF, "fp32", "fp32"),
        (BF16_OFF, "bf16", None),
        ({"fp16": {"enabled": False}}, "bf16", "bf16"),
        ({"fp16": {"enabled": True}}, "auto", "fp16"),
        ({"fp16": {"enabled": "auto"}}, "fp16", "fp16"),
        ({}, "fp16", "fp16"),
        (BF16_ON, "fp16", None),
    ],
)
def test_precision(content: dict[str, Any], asked: str, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(UserError, match=rf"l.precision: found {asked}, but ds.json says bf16.enabled"):
            resolve_precision(run_of(asked), content)
    else:
        assert resolve_precision(run_of(asked), content) == expected


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_engine_gets_the_precision(stage: int, precision: str) -> None:
    """bf16 accumulates gradients in fp32; at stage 0 the optimiser, not the engine, keeps bf16's masters."""
    filled = fill({"zero_optimization": {"stage": stage}}, precision)
    engine_bf16 = precision == "bf16" and stage > 0
    assert filled["bf16"]["enabled"] is engine_bf16
    assert filled.get("data_types") == ({"grad_accum_dtype": "fp32"} if engine_bf16 else None)


def test_stage_and_offload() -> None:
    assert zero_stage({}) == 0 and offload_device({}, "offload_optimizer") == "none"
    content = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    assert zero_stage(content) == 1 and offload_device(content, "offload_optimizer") == "cpu"
    assert fill(content)["zero_force_ds_cpu_optimizer"] is False
    for nothing in (None, {}, {"device": "none"}):
        section = {"zero_optimization": {"offload_optimizer": nothing}}
        assert offload_device(section, "offload_optimizer") == "none"


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ('{"train_batch_size": 8,}', "ds.json is not valid JSON: .* line 1 column"),
        ("[1, 2]", "ds.json must hold a JSON object"),
        ('{"zero_optimization": {"stage": "two"}}', "zero_optimization.stage is 'two', expected 0"),
        ('{"zero_optimization": 2}', "zero_optimization is 2, expected an object"),
        (None, "cannot read '.*ds.json': No such file or directory"),
    ],
)
def test_unreadable_files_are_refused(tmp_path: Path, text: str | None, pattern: str) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=pattern) as refusal:
        read_deepspeed_config(str(path))
    assert "\n" not in str(refusal.value)


def test_no_file_is_stage_0_in_fp32() -> None:
    content = read_deepspeed_config(None)
    assert zero_stage(content) == 0
    assert resolve_precision(tiny(), content) == "fp32"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_do_what_their_name_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = read_deepspeed_config(str(path))
    monkeypatch.setattr(deepspeed, "_of_folder", lambda *unused: [])  # the disk is the user's
    monkeypatch.setattr(deepspeed, "_of_async_io", list)
    for_cuda = path.stem.endswith("_cuda")
    stage, precision, *offload = path.stem.removeprefix("zero").removesuffix("_cuda").split("_")
    with with_fp16():
        assert fill(content)["train_batch_size"] == 24
    assert (zero_stage(content), resolve_precision(run_of(), content)) == (int(stage), precision)
    assert (offload_device(content, "offload_optimizer") != "none") == (offload in (["offload"], ["nvme"]))
    zero = content["zero_optimization"]
    assert zero.get("overlap_comm", False) is for_cuda
    for section in ("offload_optimizer", "offload_param"):
        assert zero.get(section, {"pin_memory": for_cuda})["pin_memory"] is for_cuda
    assert json.loads(path.read_text()) == content


def test_files_are_shipped() -> None:
    names = {f"zero{stage}_{precision}" for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")}
    names |= {f"zero{stage}_fp16" for stage in (1, 2, 3)} | {"zero3_bf16_offload", "zero3_bf16_nvme"}
    assert {path.stem for path in SHIPPED} >= names


def test_what_deepspeed_asserts_of_the_file_is_one_line(one_rank: None, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2, "reduce_scatter": false}}')
    with pytest.raises(UserError, match=r"ds\.json: DeepSpeed refuses it: Reduce Scatter in ZeRO Stage 2"):
        tiny_engine(tiny(f"parallel.deepspeed={path}"))
