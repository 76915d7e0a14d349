"""Which device a rank takes, what DeepSpeed is told of it, and what a launch on several nodes needs."""

import os
import resource

import pytest
import torch

from megamoe.errors import UserError
from megamoe.parallel import launch


@pytest.mark.parametrize(("devices", "index"), [(1, 0), (4, 3)])
def test_a_task_that_is_shown_one_device_takes_it(
    monkeypatch: pytest.MonkeyPatch, restored_process: None, devices: int, index: int
) -> None:
    """SLURM with --gpus-per-task=1 shows each task its own device, as number 0; without, all of them."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ.update(SLURM_PROCID="3", SLURM_STEP_NUM_TASKS="4", SLURM_LOCALID="3", MASTER_ADDR="here")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    world = launch.find_world()
    assert (world.local_rank, world.device) == (3, torch.device("cuda", index))
    launch._export(world)
    assert os.environ["LOCAL_RANK"] == str(index)  # by which DeepSpeed chooses its device


# As Slurm 22.05 sets them in an allocation of four tasks. Its shells and scripts are no ranks of it.
ALLOCATION = {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = {**ALLOCATION, "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("variables", "rank", "size", "of_machine"),
    [
        (ALLOCATION, 0, 1, None),  # a batch script with --ntasks
        # `salloc` with an interactive step, and `srun --ntasks=1`.
        ({**ALLOCATION, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}, 0, 1, 1),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, 3, 4, 2),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "3,1"}, 3, 4, None),
    ],
)
def test_a_step_of_slurm_is_the_world_and_its_allocation_is_not(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], rank: int, size: int, of_machine: int | None
) -> None:
    for name in [name for name in os.environ if name.startswith(("RANK", "LOCAL_", "MASTER_", "SLURM_"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if size > 1:
        with pytest.raises(UserError, match=r"or unset SLURM_STEP_NUM_TASKS for one process$"):
            launch.find_world()
        monkeypatch.setenv("MASTER_ADDR", "here")
    world = launch.find_world()
    assert (world.rank, world.size, launch.ranks_of_machine()) == (rank, size, of_machine)


def test_restarts_of_torchrun_are_for_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node's agent counts its own, so the ranks of two nodes would not meet."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    launch.find_world()
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="^torchrun: --max-restarts 3 on 2 nodes; .*checkpoint.resume=auto$"):
        launch.find_world()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    launch.find_world()


def test_a_rank_may_open_as_many_files_as_its_hard_limit_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    for limits, expected in (
        ((1024, 4096), [(4096, 4096)]),
        ((1024, resource.RLIM_INFINITY), [(launch.MOST_OPEN_FILES, resource.RLIM_INFINITY)]),
        ((4096, 4096), []),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), []),
        ((1 << 20, 1 << 20), []),
    ):
        made: list[tuple[int, int]] = []
        monkeypatch.setattr(launch.resource, "getrlimit", lambda _, limits=limits: limits)
        monkeypatch.setattr(launch.resource, "setrlimit", lambda _, new, made=made: made.append(new))
        launch.allow_open_files()
        assert made == expected, limits
