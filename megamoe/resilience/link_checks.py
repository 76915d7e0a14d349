"""Bandwidth between pairs of nodes, one rank a node. For `tools/preflight.py`."""

import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

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
