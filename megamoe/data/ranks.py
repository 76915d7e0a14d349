"""Collectives for loading data: an error on one rank is raised on all, and one rank per machine works."""

import platform
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megamoe.errors import UserError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
POLL_S = 1.0  # seconds between two collectives while a rank works

Value = TypeVar("Value")


def rank() -> int:
    """Return this process' rank; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def gather(value: Value) -> list[Value]:
    """Return the values of all ranks, in their order, on every rank. For small values, which are pickled."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def raise_any_error(problem: str | None) -> None:
    """Do what `parallel.consensus.raise_any_error` does, also without torch.distributed.

    This package may not import `parallel`: the data tools run without it.

    Raises:
        UserError: on every rank, with the first rank's problem.
    """
    for found in gather(problem):
        if found:
            raise UserError(found)


def first_ranks() -> list[int]:
    """Return the lowest rank of each machine, in ascending order."""
    machines = gather(_machine())
    return sorted({machine: number for number, machine in reversed(list(enumerate(machines)))}.values())


def once_per_machine(action: Callable[[threading.Event], Value]) -> dict[int, Value]:
    """Call `action` on the first rank of each machine; return its results by rank, on every rank.

    It may take long, see `in_thread`. Its argument is an event that is set when the ranks no longer wait.

    Raises:
        UserError: on every rank, if an action raises one.
    """
    firsts = first_ranks()
    value, problem = None, None
    try:
        value = in_thread(action if rank() in firsts else None)
    except UserError as error:
        problem = str(error)
    raise_any_error(problem)
    values: list[Any] = gather(value)
    return {first: values[first] for first in firsts}


def in_thread(action: Callable[[threading.Event], Value] | None) -> Value | None:
    """Call `action` in a thread and return its result; raise its error on this rank alone. Collective.

    Meanwhile the ranks, those without an action (None) too, run a collective every POLL_S seconds, so that
    the timeout of collectives does not end a long action; it limits a single call that holds the
    interpreter's lock. Its argument is an event that is set when the ranks no longer wait.
    """
    stop = threading.Event()
    if not dist.is_initialized():
        return None if action is None else action(stop)
    future: Future[Value] = Future()
    if action is None:
        future.cancel()
    else:
        threading.Thread(target=_run, args=(action, stop, future), daemon=True).start()
    try:
        while not all(gather(_is_done(future))):
            pass
    finally:
        stop.set()
    return None if action is None else future.result()


def _run(action: Callable[[threading.Event], Value], stop: threading.Event, future: "Future[Value]") -> None:
    try:
        future.set_result(action(stop))
    except BaseException as error:
        future.set_exception(error)


def _is_done(future: "Future[Any]") -> bool:
    return future.cancelled() or bool(wait([future], POLL_S).done)


def _machine() -> str:
    """Return host name and boot ID: hosts may share a name, and containers of a machine its boot ID."""
    try:
        boot = BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{platform.node()} {boot}"
