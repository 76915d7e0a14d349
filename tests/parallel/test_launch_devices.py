"""Which device a rank takes, and what DeepSpeed is told of it."""

import os

import pytest
import torch

from megamoe.parallel import launch


@pytest.mark.parametrize(("devices", "index"), [(1, 0), (4, 3)])
def test_a_task_that_is_shown_one_device_takes_it(
    monkeypatch: pytest.MonkeyPatch, restored_process: None, devices: int, index: int
) -> None:
    """SLURM with --gpus-per-task=1 shows each task its own device, as number 0; without, all of them."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ.update(SLURM_PROCID="3", SLURM_NTASKS="4", SLURM_LOCALID="3", MASTER_ADDR="here")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    world = launch.find_world()
    assert (world.local_rank, world.device) == (3, torch.device("cuda", index))
    launch._export(world)
    assert os.environ["LOCAL_RANK"] == str(index)  # by which DeepSpeed chooses its device
