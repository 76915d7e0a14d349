"""A writer takes the time that training leaves, and after a while its share."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from megamoe.checkpoint import writer
from megamoe.resilience import heartbeat


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
    save.wait()
    assert save.is_done and save.problem is None


@pytest.mark.skipif(sys.platform != "linux", reason="a thread's own scheduling is Linux's")
def test_a_writer_that_is_waited_for_has_ordinary_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    save.wait()
    assert policies[0] == os.SCHED_IDLE and policies[-1] == os.SCHED_OTHER


def test_the_watchdog_is_told_of_what_the_last_save_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the main thread waits: each time that the files have grown, and never while they have not."""
    monkeypatch.setattr(writer, "LOOK_EVERY_S", 0.01)
    parts, is_told = 3, threading.Event()
    seen: list[int] = []
    plain_tick = heartbeat.tick

    def tick() -> None:
        plain_tick()
        seen.append(1)
        is_told.set()

    def write(save: writer.Save, *unused: object) -> None:
        is_told.wait(30)  # of the empty folder
        for _ in range(parts):
            is_told.clear()
            with (save.folder / "shard").open("ab") as file:
                file.write(b"more")
            is_told.wait(30)
        time.sleep(0.1)  # nothing is written: nothing is told

    monkeypatch.setattr(writer, "tick", tick)
    monkeypatch.setattr(writer.Save, "_write", write)
    save = writer.Save(tmp_path, tmp_path, 0)
    save.start({}, {})
    save.wait()
    assert len(seen) == 1 + parts
