"""Mistakes in keys, values, names, sizes and files are told before the large libraries are imported."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megamoe import registry
from megamoe.validation.early import early_problems, shorter_warmup
from tests.support.refusals import Case, cases
from tests.support.tiny import ROOT

DEMO = str(ROOT / "examples/demo.yaml")
MISTAKES = cases("early")  # overrides of examples/demo.yaml
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
    command = [
        sys.executable,
        "-c",
        IN_A_NEW_PROCESS,
        DEMO,
        json.dumps([case.values[0]["override"] for case in MISTAKES]),
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    *rows, imported = map(json.loads, ran.stdout.splitlines())
    assert imported == []
    return {override: (code, lines, seconds) for override, code, lines, seconds in rows}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_without_the_libraries(
    told: dict[str, tuple[int, list[str], float]],
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    expect_message: Callable[..., None],
) -> None:
    code, lines, seconds = told[case["override"]]
    assert code == 2 and seconds < 1.5
    expect_message(case, lines)
    monkeypatch.chdir(ROOT)
    problems, _ = early_problems(DEMO, [case["override"]])  # with the parts imported
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
