"""Hostile input, case by case: one line that names the key or file, exit code 2, at once; nothing is left.

Everything runs in this process: `load_config`, the checks before the ranks start, or a tool's `main`.
"""

import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from megamoe.config import dump_yaml, load_config
from megamoe.errors import UserError
from megamoe.validation import memory
from tests.support.tiny import BASE

ROOT = Path(__file__).parents[1]
AT_ONCE_S = 10  # on a busy machine; each takes a few ms
Tool = Callable[..., str]

BAD_YAML = {
    "a map of text": ("name: !!map x", "line 1 is not valid YAML: the tag !!map is not read"),
    "an int of text": ("seed: !!int abc", "the tag !!int is not read"),
    "a bool of text": ("overwrite: !!bool maybe", "the tag !!bool is not read"),
    "a set as a name": ("name: !!set {a, b}", "the tag !!set is not read; write the value without it"),
    "a date as a number": ("train: {steps: 2024-01-01}", "train.steps: expected a whole number, found '2024"),
    "a sexagesimal number": ("train: {steps: 1:30}", "train.steps: expected a whole number, found '1:30'"),
    "an octal of YAML 1.1": ("train: {steps: 010}", "train.steps: expected a whole number, found '010'"),
    "a huge integer": (f"seed: {'9' * 5000}", "line 1 is not valid YAML: 999"),
    "a large integer": (f"seed: {'9' * 4000}", "seed: expected a number below 4294967296, found 999"),
    "an anchor in itself": ("name: &a [*a]", "the anchor &a contains itself"),
    "a bomb of aliases": (
        "a: &a [1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefgh")),
        "more than 30,000 values, with its aliases written out",
    ),
    "a long text many times": (
        f"a: &a {'x' * 100_000}\nb: [{','.join(['*a'] * 9000)}]",
        "more than 30,000 values, with its aliases written out",
    ),
    "deep aliases": (
        "a: &a " + "[" * 30 + "]" * 30 + "\nb: " + "[" * 30 + "*a" + "]" * 30,
        "nested more than 50 levels deep, with its aliases written out",
    ),
    "deep lists": (f"a: {'[' * 5000}", "nested more than 50 levels deep"),
    "text that is no Unicode": ('name: "\\ud800"', "is no Unicode text"),
    "a control character": ("name: a\x01b", "the character U+0001 at place 7 is not allowed"),
    "a NUL in the name": ('name: "a\\0b"', "name: expected a path without line breaks, NULs"),
    "a line break in the name": ('name: "a\\nb"', "name: expected a path without line breaks"),
    "a name too long": (f"name: {'a' * 300}", "name: expected a path with parts of at most 240 bytes"),
    "a name that leads out": ("name: ../x", "name: expected the name of a folder inside output"),
    "no name": ("name: ''", "name: expected the name of a folder inside output"),
    "an output too long": (f"output: {'b/' * 3000}", "output: expected a path of at most 3,800 bytes"),
    "a dataset without a name": ("data: {sources: [/]}", "data.sources.0.path: expected the path"),
    "a plugin with a long name": (f"plugins: [{'a' * 5000}.py]", "plugins: no file 'aaa"),
}


@pytest.mark.parametrize("case", BAD_YAML)
def test_yaml(tmp_path: Path, case: str) -> None:
    text, expected = BAD_YAML[case]
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert expected in refused(lambda: load_config(path))


def refused(action: Callable[[], object]) -> str:
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        action()
    assert time.monotonic() - started < AT_ONCE_S
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_yaml_1_2_values_stay_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: 2024-01-01\nseed: 0x10\ntrain: {steps: 1_000}\noptimizer: {lr: 1e-4}\n")
    config = load_config(path, ["output=1:30"])
    found = (config.name, config.seed, config.train.steps, config.optimizer.lr, config.output)
    assert found == ("2024-01-01", 16, 1000, 1e-4, "1:30")
    path.write_text(dump_yaml(config))
    assert load_config(path) == config


@pytest.mark.parametrize("name", ["a pipe", "/dev/zero", "a folder", "too long", "/proc/self/mem", "large"])
@pytest.mark.parametrize("key", ["--config", "parallel.deepspeed", "data card"])
def test_files_that_are_no_plain_ones(tmp_path: Path, name: str, key: str, pretrain: Tool) -> None:
    path = tmp_path / "file"
    if name == "a pipe":
        os.mkfifo(path)
    elif name == "a folder":
        path.mkdir()
    elif name == "too long":
        path = tmp_path / ("x" * 239)
    elif name == "large":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path = Path(name)
    if key == "--config":
        assert "--config: cannot read" in refused(lambda: load_config(path))
    elif key == "parallel.deepspeed":
        assert "parallel.deepspeed: cannot read" in pretrain(f"parallel.deepspeed={path}")
    else:
        (tmp_path / "d.card.json").symlink_to(path)
        line = pretrain("data.mock=false", f"data.sources=[{tmp_path / 'd'}]")
        assert "d.card.json' cannot be read: " in line or "no file" in line


@pytest.fixture(name="pretrain")
def _pretrain(refused_run: Tool, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """The one line of a run that is refused at once."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 16 << 30)

    def call(*overrides: str) -> str:
        started = time.monotonic()
        line = refused_run(*overrides)
        assert time.monotonic() - started < AT_ONCE_S
        return line

    return call


DEEPSPEED = {
    "offload as text": (
        '{"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}',
        "offload_optimizer is",
    ),
    "offload as a list": (
        '{"zero_optimization": {"stage": 3, "offload_param": ["cpu"]}}',
        "offload_param is",
    ),
    "a device as a list": (
        '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": ["cpu"]}}}',
        "zero_optimization.offload_optimizer.device is ['cpu'], expected 'none', 'cpu' or 'nvme'",
    ),
    "stage 1.0": (
        '{"zero_optimization": {"stage": 1.0}}',
        "zero_optimization.stage is 1.0, expected 0, 1, 2 or 3",
    ),
    "stage true": ('{"zero_optimization": {"stage": true}}', "zero_optimization.stage is True, expected"),
    "a bucket": (
        '{"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000000000000000}}',
        "memory: a rank needs at least 3.6 PiB (the gradients' bucket 3.6 PiB)",
    ),
    "an odd bucket": (
        '{"zero_optimization": {"stage": 1, "allgather_bucket_size": 7}}',
        "allgather_bucket_size is 7, expected an even number",
    ),
    "a power": (
        '{"fp16": {"initial_scale_power": 1000000000000}}',
        "fp16.initial_scale_power is 1000000000000",
    ),
    "enabled 1": ('{"bf16": {"enabled": 1}}', "bf16.enabled is 1, expected true, false"),
    "an unknown option": ('{"bf16": {"enabld": true}}', "DeepSpeedBF16Config: enabld: Extra inputs"),
    "a misspelt section": ('{"zero_optimisation": {}}', "did you mean 'zero_optimization'?"),
    "a section of another kind": (
        '{"comms_logger": {"enabled": "x"}}',
        "CommsLoggerConfig: enabled: Input should be a valid boolean",
    ),
    "a key that stands twice": ('{"zero_optimization": {}, "zero_optimization": {}}', "stands twice"),
    "steps as text": ('{"steps_per_print": "x"}', "steps_per_print is 'x', expected a whole number above 0"),
    "gradients as integers": (
        '{"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "int8"}}',
        "data_types.grad_accum_dtype is 'int8', expected 'fp32', 'bf16' or 'fp16'",
    ),
    "deep": ("[" * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize("case", DEEPSPEED)
def test_deepspeed_files(pretrain: Tool, tmp_path: Path, case: str) -> None:
    content, expected = DEEPSPEED[case]
    (tmp_path / "ds.json").write_text(content)
    even = "moe.expert_ffn_hidden_size=16"  # for bf16
    assert expected in pretrain("parallel.deepspeed=ds.json", even)


MIXED = {
    "a model": (
        ["model.num_layers=1000", "model.hidden_size=65536"],
        "memory: a rank needs at least 250.1 TiB (weights 62.5 TiB, gradients 62.5 TiB, optimiser states 125",
        "make the model smaller",
    ),
    "a router's part": (
        ["moe.router.scorer={name: cosine, routing_dim: 1000000000}"],
        "memory: a rank needs at least 596.0 GiB (weights 149.0 GiB, gradients 149.0 GiB",
        "ZeRO stage or offload",
    ),
    "a batch": (
        ["train.global_batch_size=1000000000"],
        "a step's batch 208.6 GiB",
        "lower train.micro_batch",
    ),
    "a long sequence": (
        ["data.sequence_length=10000000", "data.document_aware=true", "model.vocab_size=1000000"],
        "activations ",
        "data.sequence_length",
    ),
    "wsd": (
        ["optimizer.schedule=wsd", "optimizer.wsd_decay_steps=100"],
        "optimizer.wsd_decay_steps: 100 is more than the 4 steps of the schedule",
        "optimizer.decay_steps",
    ),
    "wsd after a warm-up": (
        ["optimizer.schedule=wsd", "optimizer.wsd_decay_steps=3", "optimizer.warmup_steps=2"],
        "optimizer.wsd_decay_steps: 3 after a warm-up of 2 is more than the 4 steps",
        "optimizer.decay_steps",
    ),
    "a growing batch": (
        [
            "train.steps=1000000000",
            "train.global_batch_size=2000000",
            "train.batch_rampup={start: 2, increment: 2, samples: 1000000000000}",
        ],
        "train.batch_rampup.increment: 2 makes more than 100,000 batch sizes",
        "raise it",
    ),
}


@pytest.mark.parametrize("case", MIXED)
def test_what_cannot_run_together(pretrain: Tool, case: str) -> None:
    overrides, expected, way_out = MIXED[case]
    line = pretrain(*overrides)
    assert expected in line and way_out in line


@pytest.mark.parametrize("text", ["²", "9" * 20, "-1", "first"])
def test_a_rank_that_is_no_number(pretrain: Tool, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for name, value in {"RANK": text, "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    line = pretrain()
    assert "environment: RANK is " in line and "expected a number" in line


def test_the_bounds_leave_room_for_the_largest_models() -> None:
    """DeepSeek-V3's sizes and beyond, a context of ten million tokens, a run of a million steps."""
    config = load_config(
        None,
        [
            *BASE,
            "model={num_layers: 126, hidden_size: 16384, ffn_hidden_size: 53248, num_attention_heads: 128}",
            "model.vocab_size=256000",
            "moe.num_experts=65536",
            "data.sequence_length=10000000",
            "train={steps: 1000000, global_batch_size: 16384}",
            "model.rope_base=500000000",
            "data.sources=[{path: a, weight: 1.5e12}]",
        ],
    )
    assert config.moe.num_experts == 65536
