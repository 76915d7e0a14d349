"""Finds this process' rank: under torchrun, the deepspeed launcher, SLURM, or alone."""

import ipaddress
import os
import random
import resource
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, Queue
from typing import Any

import torch
from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore

from megamoe.compat.torch_compat import leave_new_memory_as_it_is
from megamoe.errors import UserError
from megamoe.parallel.parent_death import end_with_launcher

LATE_S = 30.0  # without rank 0, after which a rank tells what it waits for
SLURM_SIZE = "SLURM_STEP_NUM_TASKS"  # set by srun for each step
SILENT_S = 5.0  # beyond its timeout, after which PyTorch's client is taken to wait for ever
MOST_OPEN_FILES = 65_536

_store: Store | None = None  # of the rendezvous
_backend: str | None = None  # of the present world's collectives on the device
_at_stop: list[Callable[[], None]] = []


@dataclass(frozen=True)
class World:
    """This rank and its world. device: the model's; backend: of the device's collectives, nccl or gloo."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backend: str

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes what is written once."""
        return self.rank == 0

    def say(self, line: str) -> None:
        """Print a line, on rank 0 only."""
        if self.is_first:
            print(line, flush=True)


def find_world() -> World:
    """Read the launcher's environment variables, without communication.

    torchrun and deepspeed set RANK, WORLD_SIZE, LOCAL_RANK; `srun` sets SLURM_STEP_NUM_TASKS, SLURM_PROCID,
    SLURM_LOCALID; with neither, this is the only rank. SLURM_NTASKS does not count: batch scripts and the
    shells of salloc have that of the allocation, in which they are one process.

    Raises:
        UserError: if the variables are incomplete.
    """
    variables = os.environ
    refuse_restarts_on_nodes()
    if "RANK" in variables:
        rank, size, local = _numbers("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif variables.get(SLURM_SIZE, "1") != "1":
        size, rank, local = _numbers(SLURM_SIZE, "SLURM_PROCID", "SLURM_LOCALID")
        if "MASTER_ADDR" not in variables:
            raise UserError(
                "MASTER_ADDR is not set: under srun, export MASTER_ADDR and MASTER_PORT first "
                f"(examples/slurm/one_node.sbatch does), or unset {SLURM_SIZE} for one process"
            )
    else:
        rank, size, local = 0, 1, 0
    if rank >= size:
        raise UserError(f"environment: rank {rank} of {size} ranks; ranks are counted from 0")
    if torch.cuda.is_available():
        return World(rank, size, local, torch.device("cuda", _device_index(local)), "nccl")
    return World(rank, size, local, torch.device("cpu"), "gloo")


def refuse_restarts_on_nodes() -> None:
    """Refuse torchrun's restarts on several nodes.

    Each node's agent counts its own restarts. Ranks of different nodes may then have different numbers, and
    neither meet in the store nor choose the same folder.

    Raises:
        UserError: for `--max-restarts` above 0 on more than one node.
    """
    nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if nodes != "1" and restarts != "0":
        raise UserError(
            f"torchrun: --max-restarts {restarts} on {nodes} nodes; its restarts work on one node: leave it "
            "out, and let the scheduler start the job again with checkpoint.resume=auto"
        )


def ranks_of_machine() -> int | None:
    """Return the number of ranks on this machine; None if the launcher does not say.

    torchrun sets LOCAL_WORLD_SIZE, deepspeed LOCAL_SIZE, `srun` SLURM_STEP_TASKS_PER_NODE: 4, of two nodes
    4(x2), or 2,1 where the nodes differ.
    """
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"):
        text, _, _ = os.environ.get(name, "").partition("(x")
        if text.isdecimal() and 0 < len(text) < 8:
            return max(1, int(text))
    return None


def _device_index(local_rank: int) -> int:
    """Return the local rank, or 0 if the scheduler shows each task only its own device."""
    devices = torch.cuda.device_count()
    if devices == 1 and "SLURM_PROCID" in os.environ:
        return 0
    if local_rank >= devices:
        raise UserError(
            f"local rank {local_rank}, but this machine shows {devices} CUDA devices; start as many ranks"
        )
    return local_rank


def hosts_store(world: World) -> bool:
    """Whether this process hosts the store of the rendezvous: on rank 0, unless torchrun's agent does."""
    return world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def open_store(world: World, timeout_s: float) -> Store:
    """Open the key-value store of the rendezvous at MASTER_ADDR and MASTER_PORT; it lives until `stop`.

    It waits for its host only, while `dist.rendezvous` waits for all ranks.

    Raises:
        UserError: if MASTER_PORT is not a number, is in use on its host, or does not answer; if MASTER_ADDR
            does not resolve.
        RuntimeError: if the host does not answer within `timeout_s`.
    """
    global _store
    if _store is None:
        allow_open_files()  # the store's host has a socket to each rank
        _export(world)
        store = _connect(world, os.environ["MASTER_ADDR"], _port(), timeout_s)
        _store = PrefixStore(f"megamoe/attempt_{_attempt()}", store)
    return _store


def _connect(world: World, address: str, port: int, timeout_s: float) -> Store:
    """Open the store; refuse wrong addresses, and tell of a long wait.

    In a thread: PyTorch waits without a limit for a program that accepts the connection and is silent.
    """
    me = socket.gethostname()
    try:
        socket.getaddrinfo(address, port)
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR: {address[:80]!r} does not resolve on {me} ({error.strerror}); name the first node "
            "by an address that all nodes know"
        ) from None
    opened: Queue[Store | Exception] = Queue()
    arguments = (world, address, port, timeout_s, opened)
    threading.Thread(target=_open, args=arguments, name="store", daemon=True).start()
    try:
        found = opened.get(timeout=LATE_S)
    except Empty:
        sys.stderr.write(
            f"rank {world.rank} ({me}) has waited {LATE_S:.0f} s for rank 0 at {address}:{port}: has it "
            "started, and can this machine reach it (MASTER_ADDR, MASTER_PORT)?\n"
        )
        try:
            found = opened.get(timeout=max(0, timeout_s - LATE_S) + SILENT_S)
        except Empty:
            raise UserError(
                f"MASTER_PORT: {address}:{port} accepts the connection of rank {world.rank} ({me}) and does "
                "not answer: another program has the port, or rank 0 hangs; choose another port"
            ) from None
    if isinstance(found, DistNetworkError) and hosts_store(world) and "EADDRINUSE" in str(found):
        raise UserError(f"MASTER_PORT: {port} is in use on {me}; choose another one") from None
    if isinstance(found, Exception):
        raise found
    return found


def _open(
    world: World, address: str, port: int, timeout_s: float, opened: "Queue[Store | Exception]"
) -> None:
    """Put the store, or the error that opening it raised, into `opened`."""
    try:
        listener = _listener(address, port) if hosts_store(world) else None
        store = TCPStore(
            address,
            port,
            is_master=hosts_store(world),
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,  # the process group's, later, is the same
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except Exception as error:
        opened.put(error)
    else:
        opened.put(store)


def _listener(address: str, port: int) -> socket.socket | None:
    """Return a socket that listens at this address alone; None if the store is to listen on all interfaces.

    Without it PyTorch listens on all interfaces, whatever the address. So it does for a name, which other
    nodes may resolve to another address of this one, and for an address that this machine does not know as
    its own, as behind a NAT. A port in use is for PyTorch to refuse: its listener may be this process' own.
    """
    if address != "localhost":
        try:
            ipaddress.ip_address(address)
        except ValueError:
            return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError):
        return socket.create_server((address, port), family=family)
    return None


def start(world: World, timeout_minutes: float, select_device: bool = True) -> None:
    """Join the process group of all ranks.

    The store of the rendezvous is `open_store`'s. On CUDA the group has two backends: NCCL for tensors of the
    device, and gloo for objects such as error messages.

    timeout_minutes: the timeout of a collective, after which the run ends. select_device: whether this
    process uses its device from now on; False: `use_device` follows. Until then collectives of objects are
    possible, and CUDA is not initialised.
    """
    global _backend
    import deepspeed
    import torch.distributed as dist

    from megamoe.compat.deepspeed_compat import skip_shared_memory_op

    skip_shared_memory_op()
    allow_open_files()
    end_with_launcher()
    _export(world)
    if select_device:
        use_device(world)
    timeout = timedelta(minutes=timeout_minutes)
    if hosts_store(world) and not dist.is_initialized():
        open_store(world, timeout.total_seconds())  # before DeepSpeed opens it, on all interfaces
    _backend = world.backend
    backends = "cpu:gloo,cuda:nccl" if world.backend == "nccl" else world.backend
    if not dist.is_initialized():
        _join(world, backends, timeout)
    deepspeed.init_distributed(
        dist_backend=backends,
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timeout,
        rank=world.rank,
        world_size=world.size,
    )


def allow_open_files() -> None:
    """Raise this process' limit of open files to MOST_OPEN_FILES, or as far as it may.

    A rank has a socket to each other rank, and the usual limit is 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if resource.RLIM_INFINITY != soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def use_device(world: World) -> None:
    """Make this rank's GPU the current one, which initialises CUDA; nothing on the CPU."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)


def new_group(ranks: Sequence[int], timeout: timedelta | None = None, urgent: bool = False) -> Any:
    """Return a group for tensors of the device, as `dist.new_group` does. Collective over all ranks.

    urgent: on NCCL its stream has a high priority: what waits for it is on the critical path, and would
    otherwise begin after the blocks of products that are launched already.
    """
    import torch.distributed as dist

    from megamoe.compat.torch_compat import urgent_group_options

    options = urgent_group_options(timeout) if urgent and _backend == "nccl" else None
    return dist.new_group(ranks, timeout=timeout, backend=_backend, pg_options=options)


def _attempt() -> str:
    """Return how often torchrun has restarted the ranks."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _join(world: World, backends: str, timeout: timedelta) -> None:
    """Create the process group of all ranks, without binding a device to it as DeepSpeed's own call does.

    With a bound device PyTorch connects NCCL at once, which initialises CUDA, and each further group begins
    with a collective of all ranks (`ncclCommSplit`). Otherwise NCCL connects a group at its first use.

    After a restart by torchrun the store may still hold the addresses of the previous ranks, so each attempt
    has keys of its own. The store is new with `--standalone` and `--rdzv-backend`, but not with
    `--master-addr` or neither.
    """
    import torch.distributed as dist

    store, rank, size = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))
    dist.init_process_group(
        backends,
        store=dist.PrefixStore(f"attempt_{_attempt()}", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
    )


def order_device_queues() -> None:
    """Make reductions on a GPU start in launch order, so that they overlap with Megatron-Core's products.

    It must be called before the first use of CUDA.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def fix_order_of_additions() -> None:
    """Let every operator of this process add in one order, or raise a RuntimeError if it cannot.

    It must be called before the first use of CUDA. Our Triton kernels have one order anyway: they have no
    atomic additions, and no tuning by the clock.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "^NVLS")  # a switch that adds has no fixed order
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # Transformer Engine's attention
    torch.use_deterministic_algorithms(True)
    leave_new_memory_as_it_is()


def at_stop(forget: Callable[[], None]) -> None:
    """Have `stop` call a function, which forgets what was made from the process group."""
    _at_stop.append(forget)


def stop() -> None:
    """Leave the process group and forget every group made from it; `start` may be called again."""
    global _store, _backend
    import torch.distributed as dist

    for forget in _at_stop:
        forget()
    if dist.is_initialized():
        dist.destroy_process_group()
    _store = _backend = None


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
    """Set the variables that torch.distributed and DeepSpeed read, for any launcher."""
    os.environ["RANK"] = str(world.rank)
    os.environ["WORLD_SIZE"] = str(world.size)
    # DeepSpeed takes it for the index of the device, which is 0 where each task is shown one device.
    os.environ["LOCAL_RANK"] = str(world.local_rank if world.device.index is None else world.device.index)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(free_port()) if world.size == 1 else "29500"
    _port()


def _port() -> int:
    """Return MASTER_PORT.

    Raises:
        UserError: if it is no TCP port.
    """
    text = os.environ["MASTER_PORT"]
    port = int(text) if text.isascii() and text.isdecimal() and len(text) < 8 else 0
    if not 0 < port < 1 << 16:
        raise UserError(
            f"environment: MASTER_PORT is {text[:40]!r}, expected 1 to 65535; one process may unset it"
        )
    return port


def free_port() -> int:
    """Return a TCP port without a listener, below the range from which Linux gives ports to connections.

    A port of that range may be a connection's before the store listens on it.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
