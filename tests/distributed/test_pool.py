"""The pool itself: worlds of changing size, failures told, hangs ended."""

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from megamoe.parallel import launch
from tests.distributed.pool import Pool, RankError


def total_of_ranks(offset: int) -> tuple[int, int, float]:
    """(rank, world size, sum over ranks of rank + offset)."""
    world = launch.find_world()
    launch.start(world, timeout_minutes=1)
    total = torch.tensor(float(world.rank + offset))
    dist.all_reduce(total)
    return world.rank, world.size, float(total)


def fail_on_rank_1() -> None:
    world = launch.find_world()
    launch.start(world, timeout_minutes=1)
    if world.rank == 1:
        raise ValueError("the reason")
    dist.barrier()


def hang_on_rank_0() -> None:
    if launch.find_world().rank == 0:
        time.sleep(600)


def die_on_rank_0() -> None:
    if launch.find_world().rank == 0:
        os._exit(7)


def leave_a_variable() -> str | None:
    found = os.environ.get("LEFT_BY_A_JOB")
    os.environ["LEFT_BY_A_JOB"] = "yes"
    return found


def test_worlds_of_changing_size_on_the_same_processes(pool: Pool) -> None:
    for ranks in (4, 2, 1, 4):
        results = pool.run(total_of_ranks, 10, ranks=ranks)
        total = sum(range(ranks)) + 10 * ranks
        assert results == [(rank, ranks, float(total)) for rank in range(ranks)]
    pids = pool.pids()
    pool.run(total_of_ranks, 0, ranks=2)
    assert pool.pids() == pids


def test_a_job_leaves_nothing_in_the_environment(pool: Pool) -> None:
    assert pool.run(leave_a_variable, ranks=1) == [None]
    assert pool.run(leave_a_variable, ranks=1) == [None]


def test_an_exception_is_told_with_its_rank_and_the_pool_goes_on(pool: Pool) -> None:
    with pytest.raises(RankError, match="--- rank 1\n(.|\n)*ValueError: the reason"):
        pool.run(fail_on_rank_1, ranks=2)
    assert len(pool.run(total_of_ranks, 0, ranks=2)) == 2


def test_a_hang_shows_the_stack_and_a_death_its_exit_code() -> None:
    own = Pool()
    try:
        with pytest.raises(RankError, match="rank 0 did not answer\n(.|\n)*hang_on_rank_0"):
            own.run(hang_on_rank_0, ranks=2, timeout_s=2)
        assert own.pids() == []  # killed
        with pytest.raises(RankError, match="rank 0\nthe process died with exit code 7"):
            own.run(die_on_rank_0, ranks=1)
        assert own.run(total_of_ranks, 0, ranks=1) == [(0, 1, 0.0)]
    finally:
        own.stop()


PARENT = """
from tests.distributed.pool import Pool
from tests.distributed.test_pool import leave_a_variable
import os
if __name__ == "__main__":
    pool = Pool()
    pool.run(leave_a_variable, ranks=1)
    print(*pool.pids(), flush=True)
    os.kill(os.getpid(), 9)
"""


def test_workers_die_with_their_parent(tmp_path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    found = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    pids = [int(pid) for pid in found.stdout.split()]
    assert len(pids) == 1, found.stderr
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
