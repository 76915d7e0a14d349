"""Section `collectives`: collectives between the devices of this machine, alone and beside a product."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpu.findings import Machine, Section, Skip
from gpu.ranks import on_ranks
from gpu.rates import gpu_of, seconds_of
from megamoe.parallel import launch

# Bytes on each rank. 67 MB are the rows of a layer of the 1 B model, 36 MB the gradients of its experts.
SIZES = {"cuda": (1 << 20, 1 << 24, 1 << 26, 1 << 28), "quick": (1 << 16, 1 << 20)}
REDUCED = {"cuda": 36_000_000, "quick": 1 << 16}  # in fp32
PRODUCT = {"cuda": 8192, "quick": 128}
TIMEOUT_S = 50.0
TIMEOUT_MINUTES = 10  # of a collective: longer, so that a rank that hangs is told by the limit


def run(machine: Machine, section: Section) -> None:
    """Report bus bandwidths, beside what the plan assumes; required are right sums.

    They are those of nccl-tests: for n ranks the bytes of a rank over the seconds, times 2 (n - 1) / n for an
    all-reduce, 1 for a reduction to one rank and (n - 1) / n for the others. They can be compared with the
    bandwidth of the links.
    """
    if machine.count < 2:
        raise Skip("one device: there is nothing to exchange")
    kind = "quick" if machine.quick else "cuda"
    given = {"sizes": list(SIZES[kind]), "reduced": REDUCED[kind], "product": PRODUCT[kind]}
    found = on_ranks(machine, machine.count, "collectives", given, machine.limit(TIMEOUT_S))
    section.add("sums of the all-reduce", "right" if found["right"] else "wrong", holds=bool(found["right"]))
    for name, size, bandwidth in found["bandwidths"]:
        section.add(f"{name}, {size / 1e6:.1f} MB", bandwidth, "GB/s", note="bus bandwidth")
        if name == "all-to-all":
            share = 1e9 * bandwidth / gpu_of(machine).nvlink
            section.expect("link", size, "", share, f"all-to-all of {machine.count} devices")
    section.add("the smallest all-reduce", found["start_s"] * 1e6, "us")
    section.expect("collective_s", 0, "", found["start_s"], "an all-reduce of 4 bytes")
    alone_s, reduce_s, both_s = found["beside_s"]
    hidden = max(0.0, alone_s + reduce_s - both_s) / min(alone_s, reduce_s)
    note = (
        f"product {alone_s * 1e3:.2f} ms, reduction {reduce_s * 1e3:.2f} ms, together {both_s * 1e3:.2f} ms"
    )
    section.add("a reduction beside a product: hidden", hidden, note=note)
    section.expect("hidden", 0, "", min(1.0, max(1e-9, hidden)), note)


def on_rank(given: dict[str, Any]) -> dict[str, Any]:
    """Measure on this rank; the same numbers of bytes on every rank."""
    world = launch.find_world()
    launch.start(world, timeout_minutes=TIMEOUT_MINUTES)
    try:
        bandwidths = [each for size in given["sizes"] for each in _bandwidths(world, size)]
        bandwidths.append(_reduction(world, given["reduced"]))
        one = torch.ones(1, device=world.device)
        return {
            "rank": world.rank,
            "right": _sums_are_right(world),
            "bandwidths": bandwidths,
            "start_s": seconds_of(lambda: dist.all_reduce(one)),
            "beside_s": _beside(world, given["product"], given["reduced"]),
        }
    finally:
        launch.stop()


def _bandwidths(world: launch.World, size: int) -> list[tuple[str, int, float]]:
    """Return the name, bytes and GB/s of each collective in bf16."""
    ranks, share = world.size, (world.size - 1) / world.size
    count = size // 2 // ranks * ranks
    sent, received = (torch.ones(count, dtype=torch.bfloat16, device=world.device) for _ in range(2))
    part = torch.ones(count // ranks, dtype=torch.bfloat16, device=world.device)
    # Every second pair of ranks gets half as much again, and sends as much: the sums are those of even rows.
    rows = [count // ranks] * ranks
    extra = count // ranks // 2
    partner = (world.rank + ranks // 2) % ranks
    if ranks % 2 == 0:
        rows[world.rank] -= extra
        rows[partner] += extra
    calls: list[tuple[str, float, Callable[[], object]]] = [
        ("all-reduce", 2 * share, lambda: dist.all_reduce(sent)),
        ("all-to-all", share, lambda: dist.all_to_all_single(received, sent)),
        ("uneven all-to-all", share, lambda: dist.all_to_all_single(received, sent, rows, rows)),
        ("all-gather", share, lambda: dist.all_gather_into_tensor(received, part)),
        ("reduce-scatter", share, lambda: dist.reduce_scatter_tensor(part, sent)),
    ]
    return [(name, 2 * count, factor * 2 * count / seconds_of(call) / 1e9) for name, factor, call in calls]


def _reduction(world: launch.World, size: int) -> tuple[str, int, float]:
    """Return the same of a reduction in fp32 to one rank after the other."""
    gradients = torch.ones(size // 4, device=world.device)

    def reduce_to_all() -> None:
        for owner in range(world.size):
            dist.reduce(gradients, owner)

    return ("reduction to one rank, fp32", size, world.size * size / seconds_of(reduce_to_all) / 1e9)


def _beside(world: launch.World, side: int, size: int) -> tuple[float, float, float]:
    """Return seconds of products, of reductions in fp32, and of both at the same time."""
    left = torch.ones(side, side, device=world.device).bfloat16()
    gradients = torch.ones(size // 4, device=world.device)

    def product() -> None:
        torch.mm(left, left)

    def reduction() -> None:
        dist.reduce(gradients, 0)

    def both() -> None:
        work = dist.reduce(gradients, 0, async_op=True)
        torch.mm(left, left)
        if work is not None:
            work.wait()

    return seconds_of(product), seconds_of(reduction), seconds_of(both)


def _sums_are_right(world: launch.World) -> bool:
    mine = torch.full((1000,), float(world.rank + 1), device=world.device)
    dist.all_reduce(mine)
    expected: Tensor = torch.full_like(mine, world.size * (world.size + 1) / 2)
    return bool(torch.equal(mine, expected))
