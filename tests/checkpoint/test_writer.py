"""A writer takes the time that training leaves, and after a while its share."""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megamoe.checkpoint import manager, writer
from megamoe.train.loop import train
from megamoe.train.trainer import Trainer
from tests.support.tiny import restored_process, tiny


def wait(save: writer.Save) -> None:
    while save.wait()[0]:
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="a thread's own scheduling is Linux's")
def test_a_writer_starts_at_idle_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()

    def write(*unused: object) -> None:
        began.set()
        go_on.wait(30)

    monkeypatch.setattr(writer.Save, "_write", write)
    save = writer.Save(tmp_path, tmp_path, 0)
    save.start({}, {})
    began.wait(30)
    thread = save._thread
    assert thread is not None and thread.native_id is not None
    assert not save.is_done and os.sched_getscheduler(thread.native_id) == os.SCHED_IDLE
    monkeypatch.setattr(writer, "IDLE_PRIORITY_S", 0)
    assert not save.is_done and os.sched_getscheduler(thread.native_id) == os.SCHED_OTHER
    assert save.problem == "writing was broken off"
    go_on.set()
    wait(save)
    assert save.is_done and save.problem is None


@pytest.mark.skipif(sys.platform != "linux", reason="a thread's own scheduling is Linux's")
def test_a_writer_that_is_waited_for_has_ordinary_priority(tmp_path: Path, monkeypatch: Any) -> None:
    """Else a save at a run's end, or before a job's time limit, would wait for an idle core."""
    began, policies = threading.Event(), list[int]()

    def write(save: writer.Save, *unused: object) -> None:
        began.set()
        for _ in range(1000):
            policies.append(os.sched_getscheduler(0))
            if policies[-1] == os.SCHED_OTHER:
                return
            time.sleep(0.01)

    monkeypatch.setattr(writer.Save, "_write", write)
    save = writer.Save(tmp_path, tmp_path, 0)
    save.start({}, {})
    began.wait(30)
    wait(save)
    assert policies[0] == os.SCHED_IDLE and policies[-1] == os.SCHED_OTHER


def test_growth_of_the_files_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time that they have grown, and never while they have not."""
    monkeypatch.setattr(writer, "LOOK_EVERY_S", 0.01)
    parts, is_seen = 3, threading.Event()

    def write(save: writer.Save, *unused: object) -> None:
        is_seen.wait(30)  # the empty folder
        for _ in range(parts):
            is_seen.clear()
            with (save.folder / "shard").open("ab") as file:
                file.write(b"more")
            is_seen.wait(30)
        time.sleep(0.1)  # nothing is written

    monkeypatch.setattr(writer.Save, "_write", write)
    save = writer.Save(tmp_path, tmp_path, 0)
    save.start({}, {})
    growths, writes = 0, True
    while writes:
        writes, grows = save.wait()
        growths += grows
        if grows:
            is_seen.set()
    assert growths == 1 + parts


def test_a_file_of_its_final_size_still_grows(tmp_path: Path) -> None:
    """safetensors gives its file the final size before it writes."""
    save, path = writer.Save(tmp_path, tmp_path, 0), tmp_path / "shard"
    with path.open("wb") as file:
        file.truncate(8 << 20)
    before = save._bytes_written()
    with path.open("rb+") as file:
        file.write(b"1" * (4 << 20))
        os.fsync(file.fileno())
    assert path.stat().st_size == 8 << 20 and save._bytes_written() > before


def test_a_rank_that_waits_for_another_tells_its_watchdog(tmp_path: Path, monkeypatch: Any) -> None:
    """It has written; another rank writes for four rounds, and its files grow in two of them."""
    others = iter([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    told = list[int]()

    def largest_of_ranks(values: list[float]) -> list[float]:
        assert values == [0.0, 0.0]
        return next(others)

    monkeypatch.setattr(manager, "largest_of_ranks", largest_of_ranks)
    monkeypatch.setattr(manager, "tick", lambda: told.append(1))
    save = writer.Save(tmp_path, tmp_path, 0)
    manager.Checkpoints(tmp_path, keep=1)._wait(save)
    assert len(told) == 2 and next(others, None) is None


def test_a_save_in_the_foreground_has_a_thread_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread tells the watchdog meanwhile; it is done when the save has begun."""
    threads, written = list[str](), writer.Save._write

    def write(save: writer.Save, *content: Any) -> None:
        threads.append(threading.current_thread().name)
        written(save, *content)

    def begin_save(trainer: Trainer) -> None:
        begun(trainer)
        assert trainer.saver.checkpoints.is_written

    begun = Trainer.begin_save
    monkeypatch.setattr(writer.Save, "_write", write)
    monkeypatch.setattr(Trainer, "begin_save", begin_save)
    with restored_process():
        train(tiny(f"output={tmp_path}", "train.steps=1", "checkpoint.background=false"))
    assert threads == ["checkpoint"] and (tmp_path / "run/checkpoints/step_00000001/SHA256SUMS").is_file()
