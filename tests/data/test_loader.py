"""Loader processes that die: others go on at the same batch, and nothing else is broken off."""

import faulthandler
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from megamoe.data import loader
from megamoe.data.loader import MOST_DEATHS, Loader
from megamoe.errors import DEAD_LOADER

Children = Callable[[], set[Any]]


class Numbers(Dataset[int]):
    """0, 1, 2 and so on; at one of them the process does something to itself, while `trouble` is there."""

    def __init__(self, trouble: Path | None = None, at: int = -1, number: int = signal.SIGKILL) -> None:
        self.trouble, self.at, self.number = trouble, at, number

    def __getitem__(self, index: int) -> int:
        if index == self.at and self.trouble is not None and self.trouble.exists():
            self.trouble.unlink()
            time.sleep(0.2)  # another thread of the process sends what was read before
            os.kill(os.getpid(), self.number)
        return index


def pairs_from(number: int) -> list[list[int]]:
    return [[2 * n, 2 * n + 1] for n in range(number, 30)]


def opened(messages: list[str], dataset: Dataset[int] | None = None, workers: int = 2) -> Loader[list[int]]:
    return Loader(dataset or Numbers(), pairs_from, collate=list, workers=workers, report=messages.append)


@pytest.fixture
def children() -> Children:
    """Returns the processes that were started since; earlier tests may have left some of theirs."""
    before = set(multiprocessing.active_children())
    return lambda: set(multiprocessing.active_children()) - before


def kill_one(children: set[Any]) -> None:
    child = children.pop()
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    time.sleep(0.2)  # in which PyTorch would raise


@pytest.mark.parametrize("workers", [1, 2])
def test_one_that_is_killed_between_batches_is_replaced(workers: int, children: Children) -> None:
    messages: list[str] = []
    before = signal.getsignal(signal.SIGCHLD)
    batches = opened(messages, workers=workers)
    found = [next(batches) for _ in range(7)]
    kill_one(children())
    found += list(batches)
    assert found == pairs_from(0)
    (line,) = messages
    assert "a loader process died (data.workers), another goes on in its place: DataLoader worker" in line
    assert signal.getsignal(signal.SIGCHLD) is before and not children()


@pytest.mark.parametrize("at", [0, 20, 59])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_one_that_dies_while_its_batch_is_waited_for(tmp_path: Path, at: int, number: int) -> None:
    """Also by SIGBUS: a mapped file shrinks while it is read, which the next process reports."""
    messages: list[str] = []
    (tmp_path / "trouble").touch()
    start = time.monotonic()
    assert list(opened(messages, Numbers(tmp_path / "trouble", at, number))) == pairs_from(0)
    # Soon, on a busy machine too: who is not told of the death waits for WORKER_TIMEOUT_S, nine minutes.
    assert len(messages) == 1 and time.monotonic() - start < 60


def test_a_crashing_process_prints_its_stack(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert faulthandler.is_enabled()  # by pytest: PyTorch sets its own handlers over that
    (tmp_path / "trouble").touch()
    list(opened([], Numbers(tmp_path / "trouble", 8, signal.SIGSEGV)))
    output = capfd.readouterr().err
    assert "Segmentation fault" in output and f'File "{__file__}", line' in output and "__getitem__" in output


class Cut(Iterator[Any]):
    """The iterator of a loader whose process dies while it sends a batch: the connection breaks."""

    def __init__(self, batches: Loader[Any], error: Exception) -> None:
        self.batches, self.error = batches, error
        iterator: Any = batches._iterators[0]
        self.iterator, self._workers = iterator, iterator._workers

    def __next__(self) -> None:
        self.batches._iterators[0] = self.iterator
        os.kill(self._workers[0].pid, signal.SIGKILL)
        raise self.error


@pytest.mark.parametrize("error", [ConnectionResetError(), EOFError()])
def test_one_that_dies_while_it_sends_a_batch(error: Exception) -> None:
    messages: list[str] = []
    batches = opened(messages, workers=1)
    found = [next(batches) for _ in range(3)]
    batches._iterators[0] = Cut(batches, error)
    found += list(batches)
    assert found == pairs_from(0) and len(messages) == 1


def test_a_connection_that_breaks_without_a_death_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "DEATH_S", 0.1)
    batches = opened([], workers=1)
    monkeypatch.setattr(os, "kill", lambda *_: None)
    batches._iterators[0] = Cut(batches, ConnectionResetError())
    with pytest.raises(ConnectionResetError):
        next(batches)
    monkeypatch.undo()
    batches.close()


class Owner:
    """In a reference cycle; writes down the process that destroys it."""

    def __init__(self, path: Path) -> None:
        self.path, self.itself = path, self

    def __del__(self) -> None:
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")


class Collects(Numbers):
    """Its processes collect garbage."""

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_processes_do_not_destroy_what_they_inherited(tmp_path: Path, no_collection: None) -> None:
    Owner(tmp_path / "destroyed")
    batches = opened([], Collects())
    assert list(batches) == pairs_from(0)
    assert not (tmp_path / "destroyed").exists() and not gc.isenabled()
    gc.collect()
    assert (tmp_path / "destroyed").read_text() == f"{os.getpid()}\n"


def test_those_that_die_again_and_again_are_an_error(children: Children) -> None:
    messages: list[str] = []
    batches = opened(messages)
    for n in range(MOST_DEATHS):
        assert next(batches) == [2 * n, 2 * n + 1]
        kill_one(children())
    assert next(batches) == [2 * MOST_DEATHS, 2 * MOST_DEATHS + 1]
    kill_one(children())
    with pytest.raises(RuntimeError, match=DEAD_LOADER):
        next(batches)
    assert len(messages) == MOST_DEATHS
    batches.close()
    assert not children()


def test_one_that_hangs_is_an_error_and_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    monkeypatch.setattr(loader, "WORKER_TIMEOUT_S", 3)
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.3)  # patience at the end
    messages: list[str] = []
    (tmp_path / "trouble").touch()
    batches = opened(messages, Numbers(tmp_path / "trouble", 4, signal.SIGSTOP), workers=1)
    assert [next(batches), next(batches)] == pairs_from(0)[:2]
    with pytest.raises(RuntimeError, match=DEAD_LOADER):
        next(batches)
    batches.close()
    assert not messages and not children()


def test_an_error_of_the_dataset_is_not_a_dead_process() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            raise RuntimeError("DataLoader is what I am read by")

    messages: list[str] = []
    batches = opened(messages, Broken())
    with pytest.raises(RuntimeError, match="what I am read by"):
        next(batches)
    batches.close()
    assert not messages


def test_a_signal_handler_from_outside_of_python_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python shows it as None, which it does not take back."""
    before, first = signal.getsignal(signal.SIGCHLD), iter([None])
    asked = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: next(first, asked(number)))
    batches = opened([])
    assert list(batches) == pairs_from(0)
    monkeypatch.undo()
    signal.signal(signal.SIGCHLD, before)
