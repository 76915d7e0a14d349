"""The time of collectives on nodes of several GPUs: what they send inside a node, and between nodes."""

from dataclasses import dataclass

from megamoe.simulation.counter import CollectiveKey, CollectiveTotal
from megamoe.simulation.hardware import Assumptions, Gpu


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
        traffic = rounds * total.bytes * (size - 1) / size
        if here == size:
            return Sent(traffic, 0.0)
        share = (size - here) / (size - 1) if key.kind.startswith("alltoall") else 1 / here
        return Sent(traffic * (1 - share), traffic * share)

    def seconds(self, key: CollectiveKey, total: CollectiveTotal, gpu: Gpu, assumed: Assumptions) -> float:
        """Return the time of all calls; both links are in use at the same time."""
        if len(key.ranks) == 1:
            return 0.0
        sent = self.sent(key, total)
        slowest = max(sent.inside / gpu.nvlink, sent.between / gpu.network)
        return total.calls * assumed.collective_s + slowest / assumed.link
