"""Everything that follows from the configuration is computed once, at the start."""

import ast
import json
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from megamoe.parallel.zero.deepspeed_config import resolve_parallel
from megamoe.train.resolved import resolve_run
from tests.support.tiny import tiny

PACKAGE = Path(__file__).parents[2] / "megamoe"
BF16 = ("moe.expert_ffn_hidden_size=16",)  # rows of 16 bytes
ONCE = (
    "read_deepspeed_config",
    "resolve_precision",
    "zero_stage",
    "read_offload",
    "resolve_parallel",
    "resolve_vocabulary",
    "run_steps",
    "fill_in",
    "Layout.of",
    "BatchSchedule.from_config",
)


def test_each_value_is_computed_in_one_place() -> None:
    calls: dict[str, list[str]] = {name: [] for name in ONCE}
    for path in sorted(PACKAGE.rglob("*.py")):
        # The search has other layouts than the run's; a plan is checked before some parts are replaced.
        # Validation works out what it can, whatever else is wrong; comparing layouts needs other ones.
        others = ("layout_search.py", "layout_estimate.py", "plan.py", "layouts.py")
        text = path.read_text(encoding="utf-8")
        if path.name in others or "validation" in path.parts or not any(name in text for name in ONCE):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in calls:
                calls[name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert all(len(places) == 1 for places in calls.values()), calls


def test_what_is_worked_out_cannot_be_changed(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}))
    run = resolve_run(tiny(f"parallel.deepspeed={path}", "train.global_batch_size=8", *BF16), ranks=2)
    assert (run.plan.layout.data, run.plan.stage, run.plan.precision) == (2, 2, "bf16")
    assert (run.schedule.final, run.steps, run.vocabulary.size) == (8, 4, 48)
    assert run.filled["gradient_accumulation_steps"] == 2
    with pytest.raises(FrozenInstanceError):
        run.steps = 5  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        run.plan.stage = 3  # type: ignore[misc]
    run.plan.content["zero_optimization"]["stage"] = 3
    run.filled["zero_optimization"]["stage"] = 3
    assert run.plan.content["zero_optimization"]["stage"] == 2
    assert run.filled["zero_optimization"]["stage"] == 2


def test_a_run_without_a_file_is_zero_0_in_fp32() -> None:
    plan = resolve_parallel(tiny(), ranks=1)
    assert (plan.stage, plan.precision, plan.offload.optimizer, plan.content) == (0, "fp32", "none", {})
