"""Who am I among the ranks: torchrun, the deepspeed launcher, SLURM, or one process alone."""

import ctypes
import importlib
import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch

from megamoe.errors import UserError

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>: the signal that a process gets when its parent ends


@dataclass(frozen=True)
class World:
    """This rank's place. device: where its model lives; backend: nccl on CUDA, gloo elsewhere."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backend: str

    @property
    def is_first(self) -> bool:
        """Rank 0 writes what is written once."""
        return self.rank == 0


def find_world() -> World:
    """Read the launcher's environment variables; no communication yet.

    torchrun and deepspeed set RANK, WORLD_SIZE, LOCAL_RANK; `srun` sets SLURM_PROCID, SLURM_NTASKS,
    SLURM_LOCALID; with neither, this is the only rank.

    Raises:
        UserError: if the variables are incomplete.
    """
    variables = os.environ
    if "RANK" in variables:
        rank, size, local = _numbers("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif variables.get("SLURM_NTASKS", "1") != "1" and "SLURM_PROCID" in variables:
        rank, size, local = _numbers("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        if "MASTER_ADDR" not in variables:
            raise UserError(
                "MASTER_ADDR is not set: under srun, export MASTER_ADDR and MASTER_PORT first "
                "(examples/slurm/pretrain.sbatch does)"
            )
    else:
        rank, size, local = 0, 1, 0
    if rank >= size:
        raise UserError(f"environment: rank {rank} of {size} ranks; ranks are counted from 0")
    if torch.cuda.is_available():
        return World(rank, size, local, torch.device("cuda", _device_index(local)), "nccl")
    return World(rank, size, local, torch.device("cpu"), "gloo")


def ranks_of_machine() -> int:
    """How many ranks share this machine; 1 where the launcher does not tell.

    torchrun sets LOCAL_WORLD_SIZE, deepspeed LOCAL_SIZE, `srun --ntasks-per-node` SLURM_NTASKS_PER_NODE.
    """
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        text = os.environ.get(name, "")
        if text.isdecimal() and 0 < len(text) < 8:
            return max(1, int(text))
    return 1


def _device_index(local_rank: int) -> int:
    """Usually the local rank; 0 where the scheduler shows each task one device of its own."""
    devices = torch.cuda.device_count()
    if devices == 1 and "SLURM_PROCID" in os.environ:
        return 0
    if local_rank >= devices:
        raise UserError(
            f"local rank {local_rank}, but this machine shows {devices} CUDA devices; start as many ranks"
        )
    return local_rank


def start(world: World, timeout_minutes: float) -> None:
    """Join the process group of all ranks.

    timeout_minutes: how long a collective operation may take before the run ends.
    """
    import deepspeed

    _without_shared_memory_op()
    _end_with_launcher()
    _export(world)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    timeout = timedelta(minutes=timeout_minutes)
    if (attempt := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) != "0":
        _join_again(world, timeout, attempt)
    deepspeed.init_distributed(
        dist_backend=world.backend,
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timeout,
        rank=world.rank,
        world_size=world.size,
    )


def _join_again(world: World, timeout: timedelta, attempt: str) -> None:
    """After a restart by torchrun, whose store may still hold the addresses of the ranks that are gone.

    It is a new one with `--standalone` and `--rdzv-backend`, not with `--master-addr` or neither.
    """
    import torch.distributed as dist

    store, rank, size = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))
    dist.init_process_group(
        world.backend,
        store=dist.PrefixStore(f"attempt_{attempt}", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
    )


def order_device_queues() -> None:
    """On a GPU, let reductions begin in the order of their launch: Megatron-Core's tensor parallelism then
    overlaps them with products. Before CUDA is first asked for anything."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def stop() -> None:
    """Leave the process group and forget every group made from it; a new `start` may follow."""
    import deepspeed.comm.comm as deepspeed_comm
    import torch.distributed as dist

    from megamoe.parallel.groups import stop_groups

    stop_groups()
    if dist.is_initialized():
        dist.destroy_process_group()
    deepspeed_comm.cdb = None


def _numbers(*names: str) -> list[int]:
    values = []
    for name in names:
        text = os.environ.get(name, "")
        if not (text.isdecimal() and len(text) < 8):
            raise UserError(
                f"environment: {name} is {text[:40]!r}, expected a number; launch with torchrun, "
                f"deepspeed or srun, or unset {names[0]} for one process"
            )
        values.append(int(text))
    return values


def _export(world: World) -> None:
    """What torch.distributed and DeepSpeed read, whoever launched us."""
    os.environ["RANK"] = str(world.rank)
    os.environ["WORLD_SIZE"] = str(world.size)
    os.environ["LOCAL_RANK"] = str(world.local_rank)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(_free_port()) if world.size == 1 else "29500"


def _end_with_launcher() -> None:
    """Where torchrun's agent or DeepSpeed's launcher is killed, its ranks are told to stop (SIGTERM).

    They would else train on, watched by nobody. A shell that starts a rank may end as it likes.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or "CROSS_RANK" in os.environ:  # the latter is DeepSpeed's
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _without_shared_memory_op() -> None:
    """DeepSpeed's CPU backend would compile a shared-memory all-reduce at the first start.

    That takes 30 to 60 s once per user, leaves memory behind after a kill, and only inference uses it.
    """
    # By its full name: `import deepspeed.comm.torch as x` yields torch itself, which that package imports.
    backend = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]
