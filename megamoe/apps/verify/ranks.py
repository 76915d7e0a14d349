"""Ranks on this machine: new processes for each job, forked from one that has imported everything.

The fork server of multiprocessing imports once, so a world of ranks costs half a second. Each job has new
processes: a process that has left a world keeps threads of its transport, which would accumulate.
"""

import faulthandler
import gc
import multiprocessing
import os
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

from megamoe.parallel import launch

# After one rank has failed, most others find their connection closed; the rest hang.
GRACE_S = 5.0
World = dict[Any, Any]  # the process of each rank, in their order, by our end of its pipe


class RankError(RuntimeError):
    """A rank raised, died or ran out of time; the message holds the tracebacks."""


class RankPool:
    """Runs jobs on ranks."""

    def __init__(self, device: str = "cpu", preload: str = "megamoe.apps.verify.train_run") -> None:
        """Start the fork server's imports. device: cpu hides this machine's GPUs. preload: the module whose
        import takes long.
        """
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([preload])
        before = dict(os.environ)
        # Of the fork server: the libraries' warnings at import, and threads that ranks would fight for.
        os.environ.update(PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1")
        if device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        forkserver.ensure_running()
        os.environ.clear()
        os.environ.update(before)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int,
        timeout_s: float = 600,
        log: Path | None = None,
    ) -> list[Any]:
        """Return the results of function(*args) on rank 0, rank 1, ... of a new world.

        log: receives what the ranks print.

        Raises:
            RankError: with every rank's traceback, if one raises; with every rank's stack after `timeout_s`.
        """
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launch.free_port())}
        variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        world: World = {}
        with tempfile.TemporaryDirectory(prefix="rank_stacks_") as folder:
            for rank in range(ranks):
                ours, theirs = self._context.Pipe(duplex=False)
                own = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                stack = Path(folder, str(rank))
                stack.touch()
                # Not a daemon: daemons may not have children, such as data loaders.
                arguments = (theirs, stack, log, own, function, args)
                world[ours] = self._context.Process(target=_run_rank, args=arguments)
                world[ours].start()
                theirs.close()
            try:
                answers = _gather(world, timeout_s)
                problems = [f"--- rank {rank}\n{text}" for rank, (good, text) in answers.items() if not good]
                silent = {rank: p for rank, p in enumerate(world.values()) if rank not in answers}
                problems += _stacks(silent, Path(folder))
            finally:
                for connection, process in world.items():
                    process.kill()  # it has answered, or never will
                    process.join()
                    connection.close()
        if problems:
            raise RankError(f"{function.__name__} on {ranks} ranks\n" + "\n".join(problems))
        return [answers[rank][1] for rank in range(ranks)]


def _gather(world: World, timeout_s: float) -> dict[int, tuple[bool, Any]]:
    """(worked, result or traceback) by rank, in the order in which they came."""
    waiting = {connection: rank for rank, connection in enumerate(world)}
    answers: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + timeout_s
    while waiting:
        ready: list[Any] = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting.pop(connection)
            try:
                answers[rank] = connection.recv()
            except (EOFError, ConnectionError):
                world[connection].join(1)
                answers[rank] = (False, f"the process died with exit code {world[connection].exitcode}")
            if not answers[rank][0]:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return answers


def _stacks(silent: dict[int, Any], folder: Path) -> list[str]:
    """Return the stacks of the ranks that did not answer, which each writes to its file on SIGUSR2."""
    for process in silent.values():
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR2)
    if silent:
        time.sleep(0.5)
    return [f"--- rank {rank} did not answer\n{Path(folder, str(rank)).read_text()}" for rank in silent]


def _run_rank(
    connection: Connection,
    stack: Path,
    log: Path | None,
    variables: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Run the job in the process of a rank, and send back its result or traceback."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.update(variables)
    if log is not None:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    with stack.open("w") as file:
        faulthandler.register(signal.SIGUSR2, file=file)
        try:
            gc.freeze()  # collections need not look at what was imported
            answer = True, function(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send(answer)
        launch.stop()


def _die_with_parent() -> None:
    """End with the process that has the pool; for the kernel, the fork server is the parent, and lives on."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
