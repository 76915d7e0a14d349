"""GPUs by name or from a file of rates, and the time of collectives."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megamoe.apps.plan.assumptions import Assumptions
from megamoe.apps.plan.counter import CollectiveKey, CollectiveTotal
from megamoe.errors import UserError
from megamoe.io import read_json, reason
from megamoe.metrics.gpus import GPUS, Gpu

RANKS_OF_A_NODE = 8
# Kinds of which all bytes pass each link: what stages send, and NCCL's chains from rank to rank.
WHOLE = ("send", "reduce", "broadcast")
MOST_BYTES = 1 << 16
NUMBERS = [field.name for field in fields(Gpu) if field.name != "name"]


def gpu_of(name: str) -> Gpu:
    """Return the GPU of the table, or of a JSON file with the fields of `Gpu`, in FLOP/s, bytes/s and bytes.

    Raises:
        UserError: if there is neither, or the file lacks a field or has another one.
    """
    if name in GPUS:
        return GPUS[name]
    try:
        found: Any = read_json(Path(name), MOST_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--gpu: found {name!r}, expected one of {', '.join(GPUS)}, or a JSON file: {reason(error)}"
        ) from None
    expected = f"expected name and, as numbers above 0, {', '.join(NUMBERS)}"
    if not isinstance(found, dict):
        raise UserError(f"--gpu: {name}: {expected}")
    for key in sorted(found.keys() ^ {"name", *NUMBERS}):
        raise UserError(f"--gpu: {name}: {key} is {'not a key' if key in found else 'missing'}; {expected}")
    for key in NUMBERS:
        value = found[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise UserError(f"--gpu: {name}: {key}: found {value!r}, {expected}")
    return Gpu(str(found["name"]), **{key: float(found[key]) for key in NUMBERS})


@dataclass(frozen=True)
class Topology:
    """Nodes of `ranks` GPUs each, whose ranks are neighbours. Each GPU has a network port of its own."""

    ranks: int

    def sent(self, key: CollectiveKey, total: CollectiveTotal) -> tuple[float, float]:
        """Return the bytes of all calls that one rank sends on average: in its node, and to other nodes.

        Reductions and gathers are rings, one for each rank of the group in a node, as NCCL makes them: each
        ring leaves the node once. A reduction to one rank is a chain: all bytes pass each link. An
        all-to-all sends to each rank directly.
        """
        size = len(key.ranks)
        here = sum(rank // self.ranks == key.ranks[0] // self.ranks for rank in key.ranks)
        rounds = 2 if key.kind.startswith("allreduce") else 1
        traffic = rounds * total.bytes * (1.0 if key.kind in WHOLE else (size - 1) / size)
        if here == size:
            return traffic, 0.0
        if key.kind == "send":
            return 0.0, traffic
        share = (size - here) / (size - 1) if key.kind.startswith("alltoall") else 1 / here
        return traffic * (1 - share), traffic * share

    def seconds(self, key: CollectiveKey, total: CollectiveTotal, gpu: Gpu, assumed: Assumptions) -> float:
        """Return the time of all calls; both links are in use at the same time."""
        if len(key.ranks) == 1 or not total.calls:
            return 0.0
        inside, between = self.sent(key, total)
        size = total.bytes / total.calls
        inside_s = inside / (gpu.nvlink * assumed.of("link", size))
        between_s = between / (gpu.network * assumed.of("network", size))
        away = sum(rank // self.ranks != key.ranks[0] // self.ranks for rank in key.ranks)
        peers = away if key.kind.startswith("alltoall") else 0
        return total.calls * (assumed.collective_s + peers * assumed.peer_s) + max(inside_s, between_s)
