"""The pool itself: worlds of any size, failures told, hangs ended; and worlds one after another."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megamoe.parallel import launch
from megamoe.parallel.launch import free_port
from tests.support.ranks.pool import Pool, RankError
from tests.support.ranks.runs import ROOT


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


def several_worlds(ports: list[int]) -> list[float]:
    """Start and stop a world on each port, in one process."""
    totals = []
    for port in ports:
        os.environ["MASTER_PORT"] = str(port)
        totals.append(total_of_ranks(0)[2])
        launch.stop()
    return totals


@pytest.mark.parametrize("ranks", [4, 2, 1])
def test_each_process_is_a_rank_of_the_world(pool: Pool, ranks: int) -> None:
    total = sum(range(ranks)) + 10 * ranks
    assert pool.run(total_of_ranks, 10, ranks=ranks) == [(rank, ranks, float(total)) for rank in range(ranks)]


def test_a_process_may_leave_a_world_and_join_another(pool: Pool) -> None:
    assert pool.run(several_worlds, [free_port(), free_port()], ranks=2) == [[1.0, 1.0], [1.0, 1.0]]


def test_an_exception_is_reported_with_its_rank(pool: Pool) -> None:
    with pytest.raises(RankError, match="--- rank 1\n(.|\n)*ValueError: the reason"):
        pool.run(fail_on_rank_1, ranks=2)


@pytest.mark.full
def test_a_hang_ends_with_the_stack_of_the_rank(pool: Pool) -> None:
    with pytest.raises(RankError, match="rank 0 did not answer\n(.|\n)*hang_on_rank_0"):
        pool.run(hang_on_rank_0, ranks=2, timeout_s=5)


def test_a_dead_process_is_reported_with_its_exit_code(pool: Pool) -> None:
    with pytest.raises(RankError, match="rank 0\nthe process died with exit code 7"):
        pool.run(die_on_rank_0, ranks=1)


PARENT = """
import os
from tests.support.ranks.pool import Pool
from tests.distributed.launch.test_pool import end_the_parent
if __name__ == "__main__":
    Pool().run(end_the_parent, ranks=2)
"""


def end_the_parent() -> None:
    """Rank 0 prints both pids and kills the process that started them; all then wait."""
    world = launch.find_world()
    launch.start(world, timeout_minutes=1)
    pids = [torch.tensor(0) for _ in range(2)]
    dist.all_gather(pids, torch.tensor(os.getpid()))
    if world.rank == 0:
        parent = multiprocessing.parent_process()
        assert parent is not None
        print(*(int(pid) for pid in pids), flush=True)
        os.kill(parent.pid or 0, 9)
    time.sleep(600)


@pytest.mark.full
def test_ranks_die_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (tmp_path / "errors").open("w") as errors:
        found = subprocess.run(
            [sys.executable, script], env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    pids = [int(pid) for pid in found.stdout.split()]
    assert len(pids) == 2, (tmp_path / "errors").read_text()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
