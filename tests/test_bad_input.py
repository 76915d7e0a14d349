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
from tests.support.refusals import Case, cases
from tests.support.tiny import BASE

ROOT = Path(__file__).parents[1]
AT_ONCE_S = 10  # on a busy machine; each takes a few ms
Tool = Callable[..., str]

# Of many bytes; what is wrong in a few stands in the table `config`.
BAD_YAML = {
    "a huge integer": (f"seed: {'9' * 5000}", "line 1 is not valid YAML: 999"),
    "a large integer": (f"seed: {'9' * 4000}", "seed: expected a number below 4294967296, found 999"),
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
    "a name too long": (f"name: {'a' * 300}", "name: expected a path with parts of at most 240 bytes"),
    "an output too long": (f"output: {'b/' * 3000}", "output: expected a path of at most 3,800 bytes"),
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
        return line.strip()

    return call


@pytest.mark.parametrize("case", cases("deepspeed_files"))
def test_deepspeed_files(
    pretrain: Tool, tmp_path: Path, case: Case, expect_message: Callable[..., None]
) -> None:
    (tmp_path / "ds.json").write_text(case["file"])
    even = "moe.expert_ffn_hidden_size=16"  # for bf16
    expect_message(case, pretrain("parallel.deepspeed=ds.json", even))


def test_a_deepspeed_file_that_is_nested_too_deeply(pretrain: Tool, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("[" * 100_000)
    assert "nested too deeply" in pretrain("parallel.deepspeed=ds.json")


@pytest.mark.parametrize("case", cases("together"))
def test_what_cannot_run_together(pretrain: Tool, case: Case, expect_message: Callable[..., None]) -> None:
    expect_message(case, pretrain(*case["overrides"]))


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
