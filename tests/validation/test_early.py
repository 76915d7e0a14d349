"""Mistakes in keys, values, names, sizes and files are told before the large libraries are imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megamoe import registry
from megamoe.validation.early import early_problems, shorter_warmup
from tests.support.tiny import ROOT

DEMO = str(ROOT / "examples/demo.yaml")
# Overrides of examples/demo.yaml, and what the line must have.
MISTAKES = {
    "model.hidden_sise=128": "model: unknown key 'hidden_sise'; did you mean 'hidden_size'?",
    "modle.hidden_size=128": "unknown key 'modle'; did you mean 'model'?",
    "model.hidden_size=big": "model.hidden_size: expected a whole number, found 'big'",
    "model.num_attention_heads=7": "model.hidden_size: 256 does not divide by model.num_attention_heads 7",
    "model.num_query_groups=7": "does not divide by model.num_query_groups 7",
    "model.activation=gelo": "model.activation: expected 'swiglu'",
    "model.rotary.scaling=linear": "model.rotary.factor: scaling linear needs it, found none; give it",
    "model.dtype=bf16": "parallel.precision",
    "moe.router=swich": "unknown preset 'swich'; did you mean 'switch'?",
    "moe.router.selector=topk": "unknown selector 'topk'; did you mean 'top_k'?",
    "moe.router.selektor=top_k": "moe.router: unknown key 'selektor'; did you mean 'selector'?",
    "moe.router.top_k=2": "moe.router.selector.k",
    "moe.losses={balanc: 0.1}": "moe.losses.balanc: unknown loss 'balanc'; did you mean 'switch_balance'?",
    "moe.num_experts=0": "moe.num_experts: expected",
    "moe.num_experts_per_token=2": "moe.router.selector.k",
    "train.objective=causl": "unknown objective 'causl'; did you mean 'causal'?",
    "train.steps=many": "train.steps: expected a whole number, found 'many'",
    "train.stesp=3": "train: unknown key 'stesp'; did you mean 'steps'?",
    "train.epochs=-1": "train.epochs: expected",
    "train.global_batch_size=1.5": "train.global_batch_size: expected a whole number, found 1.5",
    "optimizer.lr=fast": "optimizer.lr: expected a number, found 'fast'",
    "optimizer.lr=1e-9": "optimizer.min_lr",
    "optimizer.name=sgd": "optimizer.name: expected",
    "optimizer.warmup_steps=1000": "optimizer.warmup_steps: 1000 is more than the 300 steps of the schedule",
    "optimizer.schedule=cosin": "optimizer.schedule: expected",
    "parallel.expert=two": "parallel.expert: expected a whole number, found 'two'",
    "parallel.zero=2": "parallel.deepspeed",
    "parallel.precision=bf32": "parallel.precision: expected",
    "parallel.deepspeed=no/such.json": "parallel.deepspeed: cannot read 'no/such.json': No such file",
    "data.sources=[no/such]": "data 'no/such': no file 'no/such.bin'; prepare it with tools/prepare_data.py",
    "data.sources=no/such*": "data.sources: 'no/such*' names no prepared dataset",
    "data.sequence_length=0": "data.sequence_length: expected",
    "data.split=[1, -2, 3]": "data.split.1: expected",
    "log.wandb.projct=x": "log.wandb: unknown key 'projct'; did you mean 'project'?",
    "evaluation.evry=3": "evaluation: unknown key 'evry'; did you mean 'every'?",
    "checkpoint.keep_every=3": "checkpoint: unknown key 'keep_every'",
    "checkpoint.remote=runs": "checkpoint.remote: found 'runs', expected a URL such as s3://bucket/folder",
    "checkpoint.remote=s3:/bucket": "checkpoint.remote: found 's3:/bucket', expected a URL",
    "checkpoint.remote=s3://key:word@bucket/a": "checkpoint.remote",
    "seed=none": "seed: expected a whole number",
    "steps": "override 'steps': expected section.key=value",
    "model.hidden_size=[": "is no YAML value",
}
IN_A_NEW_PROCESS = """
import contextlib, io, json, sys, time
from megamoe.train.command import main

for override in json.loads(sys.argv[2]):
    told, start = io.StringIO(), time.process_time()
    with contextlib.redirect_stderr(told):
        code = main(["--config", sys.argv[1], override])
    print(json.dumps([override, code, told.getvalue().splitlines(), time.process_time() - start]))
print(json.dumps(sorted({"torch", "deepspeed", "megatron", "transformers"} & sys.modules.keys())))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, tuple[int, list[str], float]]:
    """By override: exit code, lines and CPU seconds, in a process that imports nothing heavy."""
    command = [sys.executable, "-c", IN_A_NEW_PROCESS, DEMO, json.dumps(list(MISTAKES))]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    *rows, imported = map(json.loads, ran.stdout.splitlines())
    assert imported == []
    return {override: (code, lines, seconds) for override, code, lines, seconds in rows}


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_is_told_without_the_libraries(
    told: dict[str, tuple[int, list[str], float]], override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, lines, seconds = told[override]
    assert code == 2 and len(lines) == 1
    assert MISTAKES[override] in lines[0]
    assert seconds < 1.5
    monkeypatch.chdir(ROOT)
    problems, _ = early_problems(DEMO, [override])  # with the parts imported
    assert lines[0].partition(" (known:")[0] == f"error: {problems[0]}".partition(" (known:")[0]


def test_the_names_in_the_sources_are_those_of_the_registry() -> None:
    for kind, names in registry.names_in_sources().items():
        assert names == [name for name, part in registry.list_parts(kind).items() if registry.is_ours(part)]


def test_what_a_plugin_may_define_is_left_to_later_checks(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("plugins: [mine.py]\nmoe: {router: my_preset}\ndata: {mock: true}\ntrain: {steps: x}\n")
    assert early_problems(str(run), []) == ([f"{run}: train.steps: expected a whole number, found 'x'"], True)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.steps=2"], ["optimizer.warmup_steps=2"]),
        (["train.steps=20"], []),
        (["train.steps=2", "optimizer.warmup_steps=20"], []),
        (["train.steps=2", "optimizer.lr=0.1"], ["optimizer.warmup_steps=2"]),
        (["train.steps=x"], []),
        ([], []),
    ],
)
def test_a_run_cut_short_on_the_command_line_has_a_shorter_warmup(
    overrides: list[str], expected: list[str]
) -> None:
    assert shorter_warmup(DEMO, overrides) == expected
