"""Worker processes for tests on several ranks: imports are done once a session, a world costs half a second.

`Pool.run(function, *args, ranks=N)` calls a function of a test module in a new world of N processes and
returns their N results. Functions are sent by name, results by plain pickle. The ranks are forks of a clean
process that has imported everything and done nothing else (multiprocessing's fork server). Each job has new
processes: a process that has left a world keeps threads of its transport, which would accumulate. The world
that a job has started is stopped after it.
"""

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from megamoe.parallel import launch

PRELOAD = "tests.support.ranks.preload"
# After one rank has failed, most others find their connection closed; the rest hang.
GRACE_S = 5


class RankError(AssertionError):
    """A rank raised, died or ran out of time; the message holds the tracebacks."""


class Pool:
    """Ranks on this machine's CPUs. A job that needs more than `most_ranks` skips its test."""

    def __init__(self, most_ranks: int = 64) -> None:
        self._most_ranks = most_ranks
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([PRELOAD])

    def prepare(self) -> None:
        """Start the imports, so that the first `run` does not wait for them."""
        forkserver.ensure_running()

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: int, timeout_s: float = 120, **kwargs: Any
    ) -> list[Any]:
        """Return the results of function(*args, **kwargs) on rank 0, rank 1, ...

        Raises:
            RankError: with every rank's traceback, if one raises; with every rank's stack after `timeout_s`.
        """
        if ranks > self._most_ranks:
            pytest.skip(f"{ranks} ranks, at most {self._most_ranks} were asked for")
        job = pickle.dumps((function, args, kwargs))
        port = str(launch.free_port())
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
        world = [_Rank(self._context, job, {**variables, "RANK": str(rank)}) for rank in range(ranks)]
        try:
            answers = _gather(world, timeout_s)
            problems = [f"--- rank {rank}\n{text}" for rank, (good, text) in answers.items() if not good]
            problems += _stacks({rank: world[rank] for rank in range(ranks) if rank not in answers})
        finally:
            for process in world:
                process.end()
        if problems:
            raise RankError(f"{function.__name__} on {ranks} ranks\n" + "\n".join(problems))
        return [answers[rank][1] for rank in range(ranks)]


class _Rank:
    """One process, the pipe from it, and the file to which it writes its stack on SIGUSR2."""

    def __init__(self, context: Any, job: bytes, variables: dict[str, str]) -> None:
        file, name = tempfile.mkstemp(prefix="rank_stack_")
        os.close(file)
        self.log = Path(name)
        self.connection, theirs = context.Pipe(duplex=False)
        # Not a daemon: daemons may not have children, such as data loaders.
        self.process = context.Process(target=_run_rank, args=(theirs, name, job, variables))
        self.process.start()
        theirs.close()

    def receive(self) -> tuple[bool, Any]:
        try:
            answer: tuple[bool, Any] = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join(1)
            return False, f"the process died with exit code {self.process.exitcode}"
        return answer

    def end(self) -> None:
        self.process.kill()  # it has answered, or never will
        self.process.join()
        self.connection.close()
        self.log.unlink(missing_ok=True)


def _gather(world: list[_Rank], timeout_s: float) -> dict[int, tuple[bool, Any]]:
    """(worked, result or traceback) by rank, in the order in which they came."""
    answers: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + timeout_s
    while len(answers) < len(world):
        waiting: dict[Any, int] = {r.connection: rank for rank, r in enumerate(world) if rank not in answers}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting[connection]
            answers[rank] = world[rank].receive()
            if not answers[rank][0]:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return answers


def _stacks(silent: dict[int, _Rank]) -> list[str]:
    """Return the stacks of the ranks that did not answer."""
    for rank in silent.values():
        with suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR2)
    if silent:
        time.sleep(0.5)
    return [f"--- rank {number} did not answer\n{rank.log.read_text()}" for number, rank in silent.items()]


def _run_rank(connection: Connection, log: str, job: bytes, variables: dict[str, str]) -> None:
    """Run the job in the process of a rank, and send back its result or traceback."""
    threading.Thread(target=_die_with_parent, args=(log,), daemon=True).start()
    os.environ.update(variables, LOCAL_RANK=variables["RANK"], LOCAL_WORLD_SIZE=variables["WORLD_SIZE"])
    with open(log, "w") as file:
        faulthandler.register(signal.SIGUSR2, file=file)
        try:
            importlib.import_module(PRELOAD)  # usually done; the fork server ignores a failed import
            function, args, kwargs = pickle.loads(job)
            answer = pickle.dumps((True, function(*args, **kwargs)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)
        launch.stop()


def _die_with_parent(log: str) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    Path(log).unlink(missing_ok=True)
    os._exit(1)
