"""Processes that a benchmark starts."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent
SHARED_FOLDER = "BENCHMARK_SHARED_FOLDER"


def environment() -> dict[str, str]:
    """Return the environment in which this tree's library and benchmarks are found first."""
    path = os.pathsep.join([str(BENCHMARKS), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


def launched(ranks: int) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment of Python on so many ranks, which share this machine's cores."""
    cores = len(os.sched_getaffinity(0))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    variables = {**environment(), "OMP_NUM_THREADS": str(max(1, cores // ranks))}
    return [sys.executable, *(launcher if ranks > 1 else [])], variables


def run_module(module: str, *arguments: str) -> tuple[int, str, str]:
    """Run a module of the benchmarks in a process of its own.

    Return the exit code, what it printed, and the last line of its error output.
    """
    command = [sys.executable, "-m", module, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment())
    return ended.returncode, ended.stdout, (ended.stderr.strip().splitlines() or ["no message"])[-1]


def run_ranks(script: Path, arguments: list[str], ranks: int) -> int:
    """Run the same command on so many ranks; return its exit code."""
    python, variables = launched(ranks)
    with tempfile.TemporaryDirectory() as folder:
        variables[SHARED_FOLDER] = folder
        return subprocess.run([*python, str(script), *arguments], env=variables).returncode


@contextmanager
def temporary_folder() -> Iterator[str]:
    """Give a folder until the end of the block: the same to all ranks of `run_ranks`."""
    if shared := os.environ.get(SHARED_FOLDER):
        yield shared
        return
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def is_rank_of(ranks: int) -> bool:
    """Return whether this process is one of so many that a launcher has started."""
    return ranks > 1 and os.environ.get("WORLD_SIZE") == str(ranks)


def is_first() -> bool:
    """Return whether this is the first rank, or the only process."""
    return os.environ.get("RANK", "0") == "0"
