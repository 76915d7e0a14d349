"""Section `collectives`: all-reduce and all-to-all between the devices of this machine."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpu.findings import Machine, Section, Skip
from gpu.ranks import on_ranks
from gpu.rates import seconds_of
from megamoe.parallel import launch

SIZES = {"cuda": (1 << 20, 1 << 24, 1 << 28), "cpu": (1 << 16, 1 << 20)}  # bytes on each rank
TIMEOUT_S = 90.0


def run(machine: Machine, section: Section) -> None:
    """Report bus bandwidths; nothing is required.

    They are those of nccl-tests: for n ranks the bytes of a rank over the seconds, times 2 (n - 1) / n for an
    all-reduce and (n - 1) / n for an all-to-all. They can be compared with the bandwidth of the links.
    """
    if machine.count < 2:
        raise Skip("one device: there is nothing to exchange")
    sizes = SIZES["cpu"] if machine.quick else SIZES[machine.device]
    found = on_ranks(machine, machine.count, "collectives", {"sizes": list(sizes)}, TIMEOUT_S)
    section.add("sums of the all-reduce", "right" if found["right"] else "wrong", holds=bool(found["right"]))
    for name, size, bandwidth in found["bandwidths"]:
        section.add(f"{name}, {size / 2**20:g} MiB", bandwidth, "GB/s", note="bus bandwidth, bf16")


def on_rank(given: dict[str, Any]) -> dict[str, Any]:
    """Measure on this rank; the same numbers of bytes on every rank."""
    world = launch.find_world()
    launch.start(world, timeout_minutes=1)
    try:
        share = (world.size - 1) / world.size
        bandwidths = []
        for size in given["sizes"]:
            count = size // 2 // world.size * world.size
            sent, received = (torch.ones(count, dtype=torch.bfloat16, device=world.device) for _ in range(2))
            reduce_s = seconds_of(lambda sent=sent: dist.all_reduce(sent))  # type: ignore[misc]
            exchange_s = seconds_of(
                lambda sent=sent, received=received: dist.all_to_all_single(received, sent)  # type: ignore[misc]
            )
            bandwidths.append(("all-reduce", size, 2 * share * 2 * count / reduce_s / 1e9))
            bandwidths.append(("all-to-all", size, share * 2 * count / exchange_s / 1e9))
        return {"rank": world.rank, "right": _sums_are_right(world), "bandwidths": bandwidths}
    finally:
        launch.stop()


def _sums_are_right(world: launch.World) -> bool:
    mine = torch.full((1000,), float(world.rank + 1), device=world.device)
    dist.all_reduce(mine)
    expected: Tensor = torch.full_like(mine, world.size * (world.size + 1) / 2)
    return bool(torch.equal(mine, expected))
