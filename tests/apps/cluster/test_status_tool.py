"""`tools/status.py --watch`: a screen for each look, until the last step is done."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megamoe.apps.cluster import status_command as tool
from tests.support.tiny import ROOT


def beat(folder: Path, step: int, state: str = "running") -> None:
    content = {"state": state, "time": time.time(), "silence_s": 0.0, "step": step, "steps": 3}
    (folder / "heartbeat.json").write_text(json.dumps(content))


def watched(monkeypatch: pytest.MonkeyPatch, steps: list[Callable[[], None]]) -> list[float]:
    """In place of each sleep do the next of `steps`; return the seconds that were asked for."""
    asked: list[float] = []

    def sleep(seconds: float) -> None:
        asked.append(seconds)
        steps[len(asked) - 1]()

    monkeypatch.setattr(tool.time, "sleep", sleep)
    return asked


def test_watch_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beat(tmp_path, 1)
    changes = [
        lambda: beat(tmp_path, 2, "failed"),  # it may be started again
        lambda: beat(tmp_path, 2),
        lambda: beat(tmp_path, 3, "finished"),
    ]
    asked = watched(monkeypatch, changes)
    assert tool.main([str(tmp_path), "--watch", "--every", "2.5"]) == 0 and asked == [2.5] * 3
    screens = capsys.readouterr().out.split("\n\n")
    states = [dict(row.split(maxsplit=1) for row in screen.splitlines()) for screen in screens[:-1]]
    assert [state["state"] for state in states] == ["running", "failed", "running", "finished"]
    assert [state["step"] for state in states] == ["1 of 3", "2 of 3", "2 of 3", "3 of 3"]
    assert "\033" not in "".join(screens)
    # As JSON a line each.
    beat(tmp_path, 1)
    watched(monkeypatch, changes[2:])
    assert tool.main([str(tmp_path), "--watch", "--json"]) == 0
    assert [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()] == [1, 3]


def test_watch_clears_a_terminal_and_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    beat(tmp_path, 1)
    watched(monkeypatch, [interrupt])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert tool.main([str(tmp_path), "--watch"]) == 130
    assert capsys.readouterr().out.count(tool.CLEAR) == 1


@pytest.mark.full
def test_a_reader_that_goes_ends_the_watch(tmp_path: Path) -> None:
    beat(tmp_path, 1)
    command = [sys.executable, str(ROOT / "tools/status.py"), str(tmp_path), "--watch", "--every", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("run ")
        process.stdout.close()
        assert process.wait(60) == 141 and "Traceback" not in process.stderr.read()
