"""Worlds of ranks on this machine: processes forked from one that has imported everything."""

import gc
import importlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from megamoe.parallel import launch

GRACE_S = 5.0  # after one rank has failed, for the others to end


class Worlds:
    """Starts worlds, one at a time. preload: the module whose import takes long, and has the functions.
    device: cpu hides this machine's GPUs.
    """

    def __init__(self, preload: str, device: str = "cpu") -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([preload])
        # Of the fork server: the libraries' warnings at import, and threads that ranks would fight for.
        own = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        own |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        before = {name: os.environ.pop(name, None) for name in own}
        os.environ.update(own)
        forkserver.ensure_running()
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value

    def run(
        self, function: Callable[..., Any], ranks: int, *arguments: Any, log: Path, timeout_s: float = 600
    ) -> tuple[Any, str]:
        """Call a function of a module on every rank of a new world. log: receives what the ranks print.

        Returns: the first rank's result and "", or None and why a rank failed.
        """
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launch.free_port())}
        variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        processes, connections = [], []
        for rank in range(ranks):
            ours, theirs = self._context.Pipe(duplex=False)
            own = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            # No daemon: daemons may not have children, such as data loaders.
            process = self._context.Process(target=_run_rank, args=(theirs, own, log, function, arguments))
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        try:
            return _answers(connections, timeout_s)
        finally:
            for process in processes:
                process.kill()  # it has answered, or never will
                process.join()


def _answers(connections: list[Any], timeout_s: float) -> tuple[Any, str]:
    results: dict[int, Any] = {}
    problem, deadline = "", time.monotonic() + timeout_s
    while len(results) < len(connections):
        waiting: dict[Any, int] = {
            connection: rank for rank, connection in enumerate(connections) if rank not in results
        }
        ready: list[Any] = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            return None, problem or f"no answer within {timeout_s:.0f} s"
        for connection in ready:
            rank = waiting[connection]
            results[rank], failure = None, f"rank {rank} died"
            with suppress(EOFError, ConnectionError):
                results[rank], failure = connection.recv()
            if failure and not problem:
                problem, deadline = failure, time.monotonic() + GRACE_S
    return (None, problem) if problem else (results[0], "")


def _run_rank(
    connection: Connection, variables: dict[str, str], log: Path, function: Any, arguments: tuple[Any, ...]
) -> None:
    os.environ.update(variables)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        importlib.import_module(function.__module__)
        gc.freeze()  # collections need not look at what was imported
        answer = function(*arguments), ""
    except BaseException as error:
        lines = traceback.format_exception(error)
        answer = None, f"rank {variables['RANK']}: {type(error).__name__}: {error}\n{''.join(lines)}"
    connection.send(answer)
    launch.stop()
