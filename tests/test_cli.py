"""`megamoe COMMAND`: every tool of tools/ and training, from a clone and from an installed package."""

import importlib
import re
import subprocess
import sys

import pytest

from megamoe.cli import COMMANDS, main, summary_of
from tests.support.tiny import ROOT

OF_A_CLONE = {ROOT / "tools" / name for name in ("list_keys.py", "study_configurations.py")}
TOOLS = {*(ROOT / "tools").glob("*.py")} - OF_A_CLONE


def test_every_tool_is_a_command_and_the_reverse() -> None:
    called = {re.findall(r'run\("([a-z-]+)"\)', path.read_text())[0] for path in TOOLS}
    assert called | {"train"} == COMMANDS.keys()
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
