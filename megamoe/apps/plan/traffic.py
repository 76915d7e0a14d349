"""What a rank sends in a layout's layers: MoE layers, tensor and context parallelism."""

from dataclasses import astuple, dataclass

from megamoe.moe.dispatch.fp8 import fp8_row_bytes
from megamoe.parallel.layout import Layout

COUNT_BYTES = 8  # of a row count
SCORE_BYTES = 4  # of a score
PAIR_BYTES = 16  # of a pair between nodes: its row and expert, its weight, and the weight's gradient


@dataclass(frozen=True)
class MoETraffic:
    """Bytes sent by one rank for one MoE layer.

    tokens: without sequence parallelism, the layer's output to all tensor ranks, and its input's gradient.
    scores: all scores to all tensor ranks, and their gradient back. counts: row counts, over the
    expert-parallel and the expert-tensor group. rows: to the experts' ranks and back, forward and backward.
    slices: to the ranks with the other slices of an expert and back, forward and backward. between: between
    the nodes of an exchange by node, forward and backward; rows are then those inside the nodes. pairs: the
    experts and weights of the pairs, with the rows between nodes.
    """

    tokens: float
    scores: float
    counts: float
    rows: float
    slices: float
    between: float = 0.0
    pairs: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all."""
        return sum(astuple(self))


def moe_traffic(
    layout: Layout,
    *,
    sequence: bool,
    tokens: float,
    pairs: float,
    hidden_size: int,
    num_experts: int,
    width: int,
    row_size: int | None = None,
    nodes_of_token: float = 1.0,
    fp8: bool = False,
) -> MoETraffic:
    """Return the traffic of one layer with an even load.

    tokens, pairs: of one micro batch, over all ranks that share it. width: bytes of a number in the model's
    dtype. row_size: of the rows that go to the experts, which is the hidden size, or the size of latent
    experts.
    sequence: whether sequence parallelism is on. nodes_of_token: on how many of `layout.nodes` a token's
    experts lie on average. fp8: whether rows go to the experts in 8 bits.
    """
    row_size = row_size or hidden_size
    row = row_size * width
    # Four transfers: to the experts and back, in forward and in backward.
    transfers = 3 * row + (fp8_row_bytes(row_size) if fp8 else row)
    own = pairs / layout.batch_ranks
    inside = layout.expert // layout.nodes  # ranks
    others_slices = layout.expert_tensor - 1
    local = num_experts // layout.expert
    counts = _share(inside) * num_experts / layout.nodes + others_slices * inside * local
    between = pairs_sent = 0.0
    if layout.nodes > 1:
        away = _share(layout.nodes)
        between = away * nodes_of_token * tokens / layout.batch_ranks * transfers
        pairs_sent = away * own * PAIR_BYTES
        counts += away * (num_experts + layout.nodes)
    return MoETraffic(
        tokens=0 if sequence else 2 * _share(layout.tensor) * tokens / layout.context * hidden_size * width,
        scores=2 * _share(layout.batch_ranks) * tokens * num_experts * SCORE_BYTES,
        counts=COUNT_BYTES * counts,
        rows=_share(inside) * own * transfers,
        slices=4 * others_slices * own * row,
        between=between,
        pairs=pairs_sent,
    )


def cut_pair_traffic(layout: Layout, *, sequence: bool, tokens: float, hidden_size: int, width: int) -> float:
    """Return the traffic of an attention or dense FFN: a column-parallel product, then a row-parallel one.

    There is one all-reduce of the activations in forward and one in backward. With sequence parallelism there
    are equivalent gathers and reduce-scatters, and one more gather for the gradient of the first weight.
    """
    passes = 5 if sequence else 4
    return passes * _share(layout.tensor) * tokens / layout.context * hidden_size * width


def context_traffic(layout: Layout, *, tokens: float, query_size: int, key_size: int, width: int) -> float:
    """Return the traffic of one attention under context parallelism, forward and backward.

    Queries and outputs, keys and values go to the ranks of other heads or positions, see `ContextShard`.
    query_size, key_size: of all heads, and of all groups as they are sent.
    """
    own = tokens / layout.context
    return 2 * _share(layout.context) * own * (2 * query_size + 2 * key_size) / layout.tensor * width


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks
