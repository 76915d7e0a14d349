"""Processes that a benchmark starts."""

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent


def environment() -> dict[str, str]:
    """Return the environment in which this tree's library and benchmarks are found first."""
    path = os.pathsep.join([str(BENCHMARKS), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


def run_ranks(script: Path, arguments: list[str], ranks: int) -> int:
    """Run the same command on so many ranks of this machine, which share its cores; return its exit code."""
    cores = len(os.sched_getaffinity(0))
    variables = {**environment(), "OMP_NUM_THREADS": str(max(1, cores // ranks))}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run([sys.executable, *launcher, str(script), *arguments], env=variables).returncode


def is_rank_of(ranks: int) -> bool:
    """Return whether this process is one of so many that a launcher has started."""
    return ranks > 1 and os.environ.get("WORLD_SIZE") == str(ranks)


def is_first() -> bool:
    """Return whether this is the first rank, or the only process."""
    return os.environ.get("RANK", "0") == "0"
