"""A seed whose training stops before its last step is not evaluated."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megamoe.apps.finetune import finetune as module
from megamoe.errors import ExitCode


@pytest.mark.parametrize(("state", "code"), [("stopped", ExitCode.STOPPED), ("finished", ExitCode.FINISHED)])
def test_a_stopped_seed_is_not_evaluated(
    state: str,
    code: ExitCode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By a stand-in of the training, which ends with FINISHED after train.exit_after_steps too."""
    evaluated: list[int] = []

    def train(*unused: Any, **also_unused: Any) -> ExitCode:
        (tmp_path / "seed_1").mkdir()
        beat = {"state": state, "step": 2, "steps": 6}
        (tmp_path / "seed_1/heartbeat.json").write_text(json.dumps(beat))
        return ExitCode.FINISHED

    work = SimpleNamespace(
        output=tmp_path, configs={1: None}, about={}, open=lambda _: None, load=lambda _: None,
        evaluate=evaluated.append,
    )  # fmt: skip
    monkeypatch.setattr(module._Work, "of", lambda *_: work)
    monkeypatch.setattr(module, "train", train)
    monkeypatch.setattr(module, "_on_first", lambda _, action: action())
    for name in ("check_libraries", "results", "save_results", "table_of"):
        monkeypatch.setattr(module, name, lambda *_: None)
    examples = SimpleNamespace(left_out=["'a', line 2: no JSON", "'b', line 1: no JSON"])
    monkeypatch.setattr(module, "read_examples", lambda *_: examples)
    session: Any = SimpleNamespace(world=SimpleNamespace(say=print, is_first=True))
    task: Any = SimpleNamespace(seeds=[1])
    assert module.finetune(task, session, tmp_path) is code
    assert evaluated == ([] if state == "stopped" else [1])
    told = "seed 1: stopped at step 2 of 6; repeat the command to go on"
    printed = capsys.readouterr().out
    assert (told in printed) == (state == "stopped")
    assert printed.count("bad lines left out: 2, the first: 'a', line 2: no JSON\n") == 1
