"""Checks of nodes before training, for `megamoe preflight`: one node alone, and the bandwidth between
pairs.
"""

import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GIB = 1 << 30
LEAST_FILES, LEAST_PROCESSES = 1024, 1024  # ulimit -n, -u: files, threads and loader processes
# Sockets: a rank has one to each other rank (gloo), and the first node's store two of each rank.
FILES_OF_RANK = 3
LEAST_SHM = 64 << 20  # bytes of /dev/shm, through which loader processes and NCCL pass tensors
LEAST_LOCAL = GIB  # bytes of the temporary folder: compiled kernels
IDLE_GPU_MIB = 1024  # more memory in use: another process has the GPU
TRIAL_BYTES = 1 << 20
SMI_S = 15
SMI_FIELDS = ("index", "name", "memory.used", "ecc.errors.uncorrected.volatile.total")
TRIAL_WIDTH = 1024  # of the matrices that each GPU multiplies


def node_problems(output: Path, checkpoint_bytes: int, ranks: int) -> list[str]:
    """Return what is wrong with this node, one line each.

    output: the folder of the runs. checkpoint_bytes: the size of one checkpoint; there must be room for two.
    ranks: of the run.
    """
    problems = [*_disk_problems("output", output, 2 * checkpoint_bytes, "two checkpoints")]
    problems += _disk_problems("local", Path(tempfile.gettempdir()), LEAST_LOCAL, "compiled kernels")
    return [*problems, *limit_problems(ranks), *gpu_problems()]


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above that exists; a run makes the rest."""
    return next((each for each in (folder, *folder.parents) if each.exists()), folder)


def _disk_problems(what: str, folder: Path, needed: int, purpose: str) -> Iterator[str]:
    """Write, sync and remove a small file, and compare the free space."""
    there = existing(folder)
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".preflight_") as file:
            file.write(bytes(TRIAL_BYTES))
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(there).free
    except OSError as error:
        yield f"{what} disk {folder}: {error.strerror}; free some space or name another folder"
        return
    if free < needed:
        has = f"{free / GIB:.1f} GiB free, expected {needed / GIB:.1f} GiB"
        yield f"{what} disk {folder}: {has} for {purpose}"


def limit_problems(ranks: int) -> Iterator[str]:
    """Yield the limits of this process that are too low for a run of so many ranks, which raises that of open
    files to its hard limit.
    """
    files = max(LEAST_FILES, LEAST_FILES // 2 + FILES_OF_RANK * ranks)
    (_, most_files), (processes, _) = map(resource.getrlimit, (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    for option, found, least in (("-Hn", most_files, files), ("-u", processes, LEAST_PROCESSES)):
        if found != resource.RLIM_INFINITY and found < least:
            yield f"ulimit {option} is {found}, expected at least {least}"
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/dev/infiniband").exists() and locked != resource.RLIM_INFINITY:
        yield f"ulimit -l is {locked} bytes, expected unlimited: InfiniBand needs pinned memory"
    with suppress(OSError):
        free = shutil.disk_usage("/dev/shm").free
        if free < LEAST_SHM:
            yield f"/dev/shm has {free >> 20} MiB free, expected at least {LEAST_SHM >> 20} MiB"


def gpu_problems() -> Iterator[str]:
    """Yield what nvidia-smi tells of GPUs that are missing, in use or broken; nothing without nvidia-smi."""
    expected = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    if shutil.which("nvidia-smi") is None:
        if expected not in ("", "0"):
            yield f"nvidia-smi is not found, and Slurm gave the job {expected} GPUs"
        return
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S)
    except subprocess.TimeoutExpired:
        yield f"nvidia-smi did not answer within {SMI_S} s: a GPU or its driver hangs"
        return
    if done.returncode:
        yield f"nvidia-smi failed: {(done.stdout + done.stderr).strip().splitlines()[0][:200]}"
        return
    rows = [[cell.strip() for cell in row.split(",")] for row in done.stdout.strip().splitlines()]
    if expected.isdecimal() and len(rows) < int(expected):
        yield f"{len(rows)} GPUs, expected {expected}"
    for index, name, used, errors in rows:
        if used.isdecimal() and int(used) > IDLE_GPU_MIB:
            yield f"GPU {index} ({name}) is in use: {used} MiB"
        if errors.isdecimal() and int(errors):
            yield f"GPU {index} ({name}) has {errors} uncorrected memory errors"


def compute_problems(devices: Sequence[torch.device] | None = None) -> Iterator[str]:
    """Yield the devices that cannot multiply two matrices of ones, or compute a wrong product.

    devices: all GPUs that this process sees, by default. Takes memory on each of them, so the check that they
    are idle comes before it.
    """
    if devices is None:
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in devices:
        try:
            ones_NN = torch.ones(TRIAL_WIDTH, TRIAL_WIDTH, device=device)
            is_right = bool((ones_NN @ ones_NN == TRIAL_WIDTH).all())
        except RuntimeError as error:
            yield f"{device} cannot compute: {' '.join(str(error).split())[:160]}"
            continue
        if not is_right:
            yield f"{device} computes a wrong product of two matrices"


BYTES = 4 << 20  # of the tensor of a test
REPEATS = 3
LIMIT_S = 20.0  # for a pair, before it counts as broken


def rounds_of_pairs(ranks: int, most: int) -> list[list[tuple[int, int]]]:
    """Return at most `most` rounds of disjoint pairs; `ranks - 1` (or `ranks`, if odd) rounds have all pairs.

    This is the circle method of round-robin tournaments: one place is fixed, and the others rotate.
    """
    places: list[int | None] = [*range(ranks), *([None] if ranks % 2 else [])]
    rounds = []
    for _ in range(min(most, len(places) - 1)):
        half = len(places) // 2
        both = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in both if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def measure_pairs(
    rank: int, rounds: list[list[tuple[int, int]]], device: torch.device
) -> dict[tuple[int, int], tuple[float, float]]:
    """Return this rank's pairs with their bandwidths in GB/s: of an all-reduce, and of an all-to-all.

    The bytes are those that one rank sends to the other. Needs a process group of all ranks.

    Raises:
        RuntimeError: if the other rank does not answer in time.
    """
    found = {}
    for pairs in rounds:
        for pair in pairs:
            if rank in pair:
                group = dist.new_group(
                    list(pair), timeout=timedelta(seconds=LIMIT_S), use_local_synchronization=True
                )
                found[pair] = _measure(group, device)
    return found


def _measure(group: Any, device: torch.device) -> tuple[float, float]:
    values_N = torch.zeros(BYTES // 4, device=device)
    received_N = torch.empty_like(values_N)
    reduce_s = _seconds(lambda: dist.all_reduce(values_N, group=group), device)
    exchange_s = _seconds(lambda: dist.all_to_all_single(received_N, values_N, group=group), device)
    return BYTES / reduce_s / 1e9, BYTES / 2 / exchange_s / 1e9


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Return the shortest of a few times; the first call, which connects the ranks, does not count."""
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def slow_ranks(found: dict[tuple[int, int], tuple[float, float]], factor: float) -> dict[int, str]:
    """Return the ranks whose pairs are slow, each with a line: below `factor` of the median of all pairs.

    A slow pair does not tell which of its two ranks is slow. So a rank counts by the median of its pairs, and
    it needs two pairs or more.
    """
    slow: dict[int, str] = {}
    for place, name in enumerate(("all-reduce", "all-to-all")):
        if not found:
            break
        usual = statistics.median(speeds[place] for speeds in found.values())
        for rank in sorted({rank for pair in found for rank in pair}):
            own = [speeds[place] for pair, speeds in found.items() if rank in pair]
            mine = statistics.median(own)
            if len(own) > 1 and mine < factor * usual and rank not in slow:
                slow[rank] = f"{name} at {mine:.2f} GB/s, the median of all pairs is {usual:.2f} GB/s"
    return slow
