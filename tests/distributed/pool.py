"""Worker processes that play the ranks: imports are paid once a session, a world costs under a second.

`Pool.run(function, *args, ranks=N)` calls a function of a test module in a fresh world of N processes and
returns their N results. Functions travel by name, results by plain pickle. The workers are forks of a clean
process that has imported everything and nothing else (multiprocessing's fork server), made when a world
first needs them, and made anew after a job that left one of them hanging or dead.
"""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = "tests.distributed.preload"
START_TIMEOUT_S = 180
# After one rank has failed, the others mostly find their connection closed; the rest hangs for good.
GRACE_S = 5


class RankError(AssertionError):
    """A rank raised, died or ran out of time; the message holds the tracebacks."""


class Pool:
    """Ranks on this machine's CPUs."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: int, timeout_s: float = 120, **kwargs: Any
    ) -> list[Any]:
        """[function(*args, **kwargs) of rank 0, of rank 1, ...].

        Raises:
            RankError: with every rank's traceback, if one raises; with every rank's stack after `timeout_s`.
        """
        self._start(ranks)
        workers = self._workers[:ranks]
        port = _free_port()
        for rank, worker in enumerate(workers):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            variables["MASTER_ADDR"] = "127.0.0.1"
            worker.send(function, args, kwargs, {name: str(value) for name, value in variables.items()})
        answers = self._gather(workers, timeout_s)
        problems = [f"--- rank {rank}\n{text}" for rank, (good, text) in answers.items() if not good]
        if len(answers) < ranks or problems:
            missing = sorted(set(range(ranks)) - set(answers))
            problems += self._stacks(missing)
            if missing or not all(worker.process.is_alive() for worker in workers):
                self.stop()
            raise RankError(f"{function.__name__} on {ranks} ranks\n" + "\n".join(problems))
        return [answers[rank][1] for rank in range(ranks)]

    def stop(self) -> None:
        """Kill the workers; the next `run` starts others."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid or 0 for worker in self._workers]

    def _start(self, ranks: int) -> None:
        new = [_Worker() for _ in range(ranks - len(self._workers))]
        self._workers += new
        for worker in new:
            if not worker.connection.poll(START_TIMEOUT_S):
                self.stop()
                raise RankError(f"the workers did not start within {START_TIMEOUT_S} s")
            worker.connection.recv_bytes()

    @staticmethod
    def _gather(workers: list["_Worker"], timeout_s: float) -> dict[int, tuple[bool, Any]]:
        """(worked, result or traceback) by rank, failures in the order in which they came."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(workers):
            waiting = {w.connection: rank for rank, w in enumerate(workers) if rank not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]
                answers[rank] = workers[rank].receive()
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _stacks(self, ranks: list[int]) -> list[str]:
        if not ranks:
            return []
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self.pids()[rank], signal.SIGUSR2)
        time.sleep(0.5)
        return [f"--- rank {rank} did not answer\n{self._workers[rank].log.read_text()}" for rank in ranks]


class _Worker:
    """One process, the pipe to it, and the file into which it writes its stack on SIGUSR2."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([PRELOAD])
        file, name = tempfile.mkstemp(prefix="rank_stack_")
        os.close(file)
        self.log = Path(name)
        self.connection, theirs = context.Pipe()
        # Not a daemon: those may not have children, and data loaders are some.
        self.process = context.Process(target=_serve, args=(theirs, name))
        self.process.start()
        theirs.close()

    def send(self, *job: Any) -> None:
        self.connection.send_bytes(pickle.dumps(job))

    def receive(self) -> tuple[bool, Any]:
        try:
            answer: tuple[bool, Any] = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join(1)
            return False, f"the process died with exit code {self.process.exitcode}"
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.log.unlink(missing_ok=True)


def _serve(connection: Connection, log: str) -> None:
    """A worker's life: import once, then one job after the other until the parent is gone."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    # Imported already, unless the fork server could not, which it would not tell.
    importlib.import_module(PRELOAD)
    with open(log, "w") as file:
        faulthandler.register(signal.SIGUSR2, file=file)
        connection.send_bytes(b"ready")
        while True:
            try:
                job = connection.recv_bytes()
            except EOFError:
                return
            connection.send_bytes(_do(job))


def _do(job: bytes) -> bytes:
    from megamoe.parallel import launch

    before = dict(os.environ)
    try:
        function, args, kwargs, variables = pickle.loads(job)
        os.environ.update(variables)
        return pickle.dumps((True, function(*args, **kwargs)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
    finally:
        launch.stop()
        gc.collect()
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
        sys.stdout.flush()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
