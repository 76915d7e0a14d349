"""GPUs by name or from a file of rates, the assumptions of the roofline model, and the time of
collectives.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megamoe.apps.plan.counter import CollectiveKey, CollectiveTotal
from megamoe.errors import UserError
from megamoe.io import read_plain, reason
from megamoe.metrics.gpus import GPUS, Gpu

__all__ = ["ASSUMED", "GPUS", "RANKS_OF_A_NODE", "Assumptions", "Gpu"]


RANKS_OF_A_NODE = 8


@dataclass(frozen=True)
class Assumptions:
    """What share of a peak is reached, and what a launch and a wait cost. None of it was measured here.

    matmul, grouped_matmul, attention: of the peak FLOP/s. bytes, scattered_bytes: of the memory bandwidth, by
    passes over whole tensors and by rows at random places. link: of a link's bandwidth. kernel_s: from the
    end of one kernel to the beginning of the next. launch_s: the host's time for one operator in eager
    PyTorch; the device waits where its work is shorter. sync_s: from the end of what the host waits for to
    the next kernel. collective_s: start of a collective.
    """

    matmul: float = 0.70
    grouped_matmul: float = 0.55
    attention: float = 0.50
    bytes: float = 0.80
    scattered_bytes: float = 0.50
    link: float = 0.75
    kernel_s: float = 2e-6
    launch_s: float = 5e-6
    sync_s: float = 25e-6
    collective_s: float = 15e-6

    def lines(self) -> list[str]:
        """For a reader of the figures."""
        return [
            f"of the peak FLOP/s: matrix products {self.matmul:.0%}, grouped ones {self.grouped_matmul:.0%}, "
            f"flash attention {self.attention:.0%} (of its causal half)",
            f"of the memory bandwidth: {self.bytes:.0%}; rows at random places {self.scattered_bytes:.0%}",
            f"of the links: {self.link:.0%}, and {self.collective_s * 1e6:g} us to start; a node has "
            f"{RANKS_OF_A_NODE} GPUs; no collective runs beside other work, but",
            "rows travel to the experts beside shared experts, their gradients beside these and the experts' "
            "weight gradients; with train.in_flight=2 a pass lasts as long as the longer of what is computed "
            "and what else travels, in all but recomputed blocks",
            f"{self.kernel_s * 1e6:g} us between kernels, {self.launch_s * 1e6:g} us of the host for each "
            f"launch, {self.sync_s * 1e6:g} us for each wait of the host",
            "an operator reads its arguments once and writes its results once, unless "
            "megamoe/apps/plan/operators.py says otherwise; views cost nothing; TF32 is off",
            "model FLOPs: 3 x the matrix products of one forward pass under a balanced load",
        ]


ASSUMED = Assumptions()


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
        found: Any = json.loads(read_plain(Path(name), MOST_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
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
class Sent:
    """Bytes that one rank sends on average: to ranks of its node, and to other nodes."""

    inside: float
    between: float


@dataclass(frozen=True)
class Topology:
    """Nodes of `ranks` GPUs each, whose ranks are neighbours. Each GPU has a network port of its own."""

    ranks: int

    def sent(self, key: CollectiveKey, total: CollectiveTotal) -> Sent:
        """Return the bytes of all calls.

        Reductions and gathers are rings, one for each rank of the group in a node, as NCCL makes them: each
        ring leaves the node once. An all-to-all sends to each rank directly.
        """
        size = len(key.ranks)
        here = sum(rank // self.ranks == key.ranks[0] // self.ranks for rank in key.ranks)
        rounds = 2 if key.kind.startswith("allreduce") else 1
        traffic = rounds * total.bytes * (1.0 if key.kind == "send" else (size - 1) / size)
        if here == size:
            return Sent(traffic, 0.0)
        if key.kind == "send":
            return Sent(0.0, traffic)
        share = (size - here) / (size - 1) if key.kind.startswith("alltoall") else 1 / here
        return Sent(traffic * (1 - share), traffic * share)

    def seconds(self, key: CollectiveKey, total: CollectiveTotal, gpu: Gpu, assumed: Assumptions) -> float:
        """Return the time of all calls; both links are in use at the same time."""
        if len(key.ranks) == 1:
            return 0.0
        sent = self.sent(key, total)
        slowest = max(sent.inside / gpu.nvlink, sent.between / gpu.network)
        return total.calls * assumed.collective_s + slowest / assumed.link
