"""Bytes and time of collectives on nodes, against plain sums over the pairs of ranks that send."""

import pytest

from megamoe.apps.plan.assumptions import ASSUMED
from megamoe.apps.plan.counter import CollectiveKey, CollectiveTotal
from megamoe.apps.plan.hardware import GPUS, Topology
from megamoe.apps.plan.plan_page import shown_ranks

NODE = 4
GROUPS = [tuple(range(4)), tuple(range(16)), (0, 4, 8, 12), (0, 1, 4, 5), (0, 2), (0,)]
BYTES = 960


def key(ranks: tuple[int, ...], kind: str) -> CollectiveKey:
    return CollectiveKey("experts", "forward", kind, ranks)


@pytest.mark.parametrize("ranks", GROUPS)
def test_an_all_to_all_sends_to_each_rank(ranks: tuple[int, ...]) -> None:
    inside = sum(BYTES / len(ranks) for other in ranks[1:] if other // NODE == 0)
    between = sum(BYTES / len(ranks) for other in ranks[1:] if other // NODE)
    sent = Topology(NODE).sent(key(ranks, "alltoall_base"), CollectiveTotal(3, BYTES))
    assert sent == pytest.approx((inside, between))


@pytest.mark.parametrize("ranks", GROUPS)
@pytest.mark.parametrize(("kind", "rounds"), [("allreduce", 2), ("reduce_scatter_base", 1)])
def test_a_ring_leaves_each_node_once(ranks: tuple[int, ...], kind: str, rounds: int) -> None:
    """There are as many rings as ranks in a node; in each, another one of them sends to the next node."""
    size, nodes = len(ranks), sorted({rank // NODE for rank in ranks})
    of_node = [rank for rank in ranks if rank // NODE == 0]
    rows = {"inside": 0.0, "between": 0.0}
    for last in of_node:
        leaves = last == ranks[0] and len(nodes) > 1
        rows["between" if leaves else "inside"] += rounds * BYTES * (size - 1) / size / len(of_node)
    sent = Topology(NODE).sent(key(ranks, kind), CollectiveTotal(3, BYTES))
    assert sent == pytest.approx((rows["inside"], rows["between"]))


def test_the_slower_link_counts() -> None:
    gpu, topology, total = GPUS["a100"], Topology(NODE), CollectiveTotal(3, BYTES)
    start = 3 * ASSUMED.collective_s
    inside = topology.seconds(key(GROUPS[0], "alltoall_base"), total, gpu, ASSUMED)
    assert inside == pytest.approx(start + BYTES * 3 / 4 / (gpu.nvlink * ASSUMED.of("link", BYTES / 3)))
    between = topology.seconds(key(GROUPS[1], "alltoall_base"), total, gpu, ASSUMED)
    peers = 3 * 12 * ASSUMED.peer_s
    share = ASSUMED.of("network", BYTES / 3)
    assert between == pytest.approx(start + peers + BYTES * 12 / 16 / (gpu.network * share))
    assert topology.seconds(key((0,), "allreduce"), total, gpu, ASSUMED) == 0


@pytest.mark.parametrize("kind", ["reduce", "broadcast"])
def test_all_bytes_pass_each_link_of_a_chain(kind: str) -> None:
    assert Topology(NODE).sent(key(GROUPS[0], kind), CollectiveTotal(3, BYTES))[0] == BYTES


def test_larger_messages_fill_more_of_a_link() -> None:
    gpu, topology = GPUS["h100"], Topology(NODE)

    def rate(size: int) -> float:
        whole = CollectiveTotal(1, size)
        return size / topology.seconds(key(GROUPS[0], "alltoall_base"), whole, gpu, ASSUMED)

    assert rate(1 << 20) < rate(1 << 26) < rate(1 << 30)


def test_groups_are_shown() -> None:
    shown = {
        (0, 1, 2, 3): "0-3",
        tuple(range(0, 256, 8)): "0,8..248",
        (0, 8): "0,8",
        (0, 1, 4, 5): "0,1,4..",
        (0,): "0",
    }
    assert {ranks: shown_ranks(ranks) for ranks in shown} == shown
