"""`megamoe COMMAND`: every tool of tools/ and training, from a clone and from an installed package."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megamoe.apps.demo import command
from megamoe.cli import COMMANDS, main, summary_of
from tests.support.tiny import ROOT

TOOLS = {*(ROOT / "tools").glob("*.py")} - {ROOT / "tools/list_keys.py"}  # for a clone alone


def test_every_tool_is_a_command_and_the_reverse() -> None:
    called = {re.findall(r'run\("([a-z-]+)"\)', path.read_text())[0] for path in TOOLS}
    assert called | {"demo", "train"} == COMMANDS.keys()
    assert all(len(path.read_text().splitlines()) <= 15 for path in TOOLS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_main_and_a_line(name: str) -> None:
    assert callable(importlib.import_module(COMMANDS[name]).main) and 0 < len(summary_of(name)) < 110


def test_the_command_is_called_with_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "no-such-run"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_without_a_command_and_with_an_unknown_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert main(["evalute"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown command 'evalute'; did you mean 'evaluate'?")


def test_the_package_takes_commands_too() -> None:
    call = [sys.executable, "-m", "megamoe", "status", "no-such-run"]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "no-such-run" in done.stderr


def test_a_script_of_a_clone_says_its_own_name() -> None:
    script = subprocess.run(
        [sys.executable, ROOT / "tools/status.py", "--help"], capture_output=True, text=True, check=True
    )
    assert script.stdout.startswith("usage: status.py ")


def test_the_demo_prepares_its_data_once_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[str]]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "call", lambda *call: (calls.append(call), 0)[1])
    assert main(["demo", "--data-only"]) == 0 and main(["demo", "train.steps=2"]) == 0
    (tmp_path / "data/stdlib").mkdir(parents=True)
    (tmp_path / "data/stdlib/stdlib.card.json").touch()
    assert main(["demo"]) == 0
    assert [name for name, _ in calls] == ["prepare-data", "prepare-data", "train", "train"]
    _, configuration, *overrides = calls[2][1]
    assert Path(configuration).read_text() == (ROOT / "examples/demo.yaml").read_text()
    assert overrides == ["overwrite=true", "train.steps=2"]
    monkeypatch.setattr(command, "call", lambda *unused: 2)
    (tmp_path / "data/stdlib/stdlib.card.json").unlink()
    assert main(["demo"]) == 2
