"""torchrun restarts its workers after a crash: they resume, whatever the command line says."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megamoe.errors import UserError
from megamoe.resilience import processes
from megamoe.resilience.processes import Launch, Process, mark
from megamoe.train.run_folder import RunFolder, prepare_run_folder
from tests.distributed.faults.test_signals import TORCHRUN, Launched
from tests.support.tiny import tiny
from tests.train.test_run_folder import choose

# Rank 1 kills itself once before step 6; every launch notes that it was there.
KILLS_ITSELF = """
from megamoe.train.trainer import Trainer
with (here / "starts").open("a") as file:
    file.write(os.environ["RANK"] + "\\n")
step = Trainer.step
def step_or_die(self):
    if self.progress.step == 5 and self.world.rank == 1 and not (here / "killed").exists():
        (here / "killed").touch()
        os.kill(os.getpid(), 9)
    return step(self)
Trainer.step = step_or_die
Trainer.begin_save = save
"""


@pytest.mark.full  # torchrun takes most of a minute to start workers again
@pytest.mark.parametrize("every", [2, 0])
def test_restarted_workers_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """From the last checkpoint, or from step 0; the old run's folder is overwritten once."""
    from tests.distributed.faults import test_signals

    monkeypatch.setattr(test_signals, "PLUGIN", test_signals.PLUGIN + KILLS_ITSELF)
    folder = tmp_path / "a"
    (folder / "checkpoints/step_00000009").mkdir(parents=True)
    (folder / "checkpoints/step_00000009/checkpoint.json").write_text("{}")
    (folder / "config.yaml").touch()
    saves = f"checkpoint={{every: {every}, background: false}}"
    arguments = ["overwrite=true", saves, "train.steps=8"]
    launched = Launched(tmp_path, [*TORCHRUN, "--max-restarts", "2"], *arguments)
    try:
        assert launched.process.wait(120) == 0, launched.output()
    finally:
        launched.end()
    assert sorted((tmp_path / "starts").read_text().split()) == ["0", "0", "1", "1"]
    rows = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3, 4, 5, 6, 7, 8]
    assert ("8, resumed after step 4" in launched.output()) == (every == 2), launched.output()
    assert not (folder / "checkpoints/step_00000009").exists()
    assert (tmp_path / "a.before-1").exists() == (every == 0)  # what the first attempt recorded
    assert (folder / "checkpoints/latest").read_text() == "step_00000008"


@pytest.fixture
def started_again(monkeypatch: pytest.MonkeyPatch) -> Launch:
    """This process is a worker of torchrun, after a restart."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    return Launch("none", [Process.of(os.getppid()).to_dict()], None)


def make_run(folder: Path, launch: Launch | None, *steps: int) -> None:
    prepare_run_folder(RunFolder(folder, (), continues=False), tiny("overwrite=true"), {}, launch)
    for step in steps:
        save(folder, step)


def save(folder: Path, step: int) -> Path:
    checkpoint = folder / "checkpoints" / f"step_{step:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text("{}")
    (folder / "checkpoints" / "latest").write_text(checkpoint.name)
    return checkpoint


@pytest.mark.parametrize("override", ["overwrite=true", "overwrite=false", "checkpoint.resume=auto"])
def test_its_own_folder_is_continued(tmp_path: Path, started_again: Launch, override: str) -> None:
    make_run(tmp_path / "a", started_again, 5)
    saved = tmp_path / "a/checkpoints/step_00000005"
    assert choose(tmp_path, override) == RunFolder(tmp_path / "a", (saved,), continues=True, restarted=True)


def test_its_own_folder_without_a_checkpoint_is_restarted_and_kept(
    tmp_path: Path, started_again: Launch
) -> None:
    make_run(tmp_path / "a", started_again)
    (tmp_path / "a/metrics.jsonl").write_text("first")
    folder = choose(tmp_path, "overwrite=true")
    assert folder == RunFolder(tmp_path / "a", (), continues=False, restarted=True)
    prepare_run_folder(folder, tiny("overwrite=true"), {}, started_again)
    assert (tmp_path / "a.before-1/metrics.jsonl").read_text() == "first"
    files = {"config.yaml", "summary.json", "launch.json"}
    assert {path.name for path in (tmp_path / "a").iterdir()} == files
    assert Launch.restarted(tmp_path / "a") == started_again


def test_a_checkpoint_that_was_there_before_is_not_its_own(tmp_path: Path, started_again: Launch) -> None:
    """The launch went back to step 5, and has saved nothing since; then it has, and starts a third time."""
    make_run(tmp_path / "a", None, 5, 10)
    back = f"checkpoint.resume={tmp_path}/a/checkpoints/step_00000005"
    launch = replace(started_again, latest=mark(tmp_path / "a/checkpoints/step_00000010"))
    prepare_run_folder(RunFolder(tmp_path / "a", (), continues=True), tiny(), {}, launch)
    again = choose(tmp_path, back)
    assert again.candidates == (tmp_path / "a/checkpoints/step_00000005",) and again.restarted
    saved = save(tmp_path / "a", 7)
    again = choose(tmp_path, back)
    assert again.candidates[0] == saved
    prepare_run_folder(again, tiny(), {}, replace(launch, latest=mark(saved)))
    assert choose(tmp_path, back).candidates[0] == saved


def test_the_newest_checkpoint_is_looked_at_before_the_first_rank_may_overwrite_it(
    tmp_path: Path, started_again: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save(tmp_path / "a", 5)
    expected = mark(saved)

    def gather(agent: object) -> list[object]:
        shutil.rmtree(tmp_path / "a")  # by the first rank, which was faster
        return [agent]

    monkeypatch.setattr(processes, "gather_from_ranks", gather)
    launch = Launch.gathered(saved)
    assert launch is not None and launch.latest == expected


@pytest.mark.parametrize("case", ["first start", "another launch", "another agent", "spoilt", "none"])
def test_the_folder_of_another_launch_is_refused(
    tmp_path: Path, started_again: Launch, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    make_run(tmp_path / "a", None if case == "none" else started_again, 5)
    if case == "first start":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    elif case == "another launch":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "other")
    elif case == "another agent":
        monkeypatch.setattr(processes, "_agent", lambda: Process.of(os.getpid()).to_dict())
    elif case == "spoilt":
        (tmp_path / "a/launch.json").write_text("{")
    with pytest.raises(UserError, match="exists: add --resume"):
        choose(tmp_path)
    assert choose(tmp_path, "overwrite=true").candidates == ()
    assert not choose(tmp_path, "overwrite=true").restarted


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_is_identified_by_more_than_its_pid() -> None:
    me = Process.of(os.getpid())
    assert me.is_alive()
    assert not Process(me.host, me.machine, me.pid, me.started - 1).is_alive()
    assert not Process(me.host, me.machine, 2**22 + 1, 0).is_alive()
