"""A writer takes the time that training leaves, and after a while its share."""

import os
import sys
import threading
from pathlib import Path

import pytest

from megamoe.checkpoint import writer


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
