"""The traffic of a layout: bytes that leave one rank in a forward and backward pass of a micro batch.

Reductions and gathers are assumed to be rings, as in NCCL and gloo: an all-gather or a reduce-scatter of n
bytes in total over r ranks sends (r - 1) / r n from each, an all-reduce twice that.
"""

from dataclasses import dataclass

from megamoe.parallel.layout import Layout

COUNT_BYTES = 8  # of a row count
SCORE_BYTES = 4  # of a score


@dataclass(frozen=True)
class MoETraffic:
    """Bytes sent by one rank for one MoE layer.

    tokens: without sequence parallelism, the layer's output to all tensor ranks, and its input's gradient.
    scores: all scores to all tensor ranks, and their gradient back. counts: row counts, over the
    expert-parallel and the expert-tensor group. rows: to the experts' ranks and back, forward and backward.
    slices: to the ranks with the other slices of an expert and back, forward and backward.
    """

    tokens: float
    scores: float
    counts: float
    rows: float
    slices: float

    @property
    def total(self) -> float:
        """The sum of all."""
        return self.tokens + self.scores + self.counts + self.rows + self.slices


def moe_traffic(
    layout: Layout,
    *,
    sequence: bool,
    tokens: float,
    pairs: float,
    hidden_size: int,
    num_experts: int,
    width: int,
) -> MoETraffic:
    """Return the traffic of one layer with an even load.

    tokens, pairs: of one micro batch, over its tensor ranks. width: bytes of a number in the model's dtype.
    sequence: whether sequence parallelism is on.
    """
    row = hidden_size * width
    own = pairs / layout.tensor
    experts_away = (layout.expert - 1) / layout.expert
    others_slices = layout.expert_tensor - 1
    local = num_experts // layout.expert
    return MoETraffic(
        tokens=0 if sequence else 2 * _share(layout.tensor) * tokens * row,
        scores=2 * _share(layout.tensor) * tokens * num_experts * SCORE_BYTES,
        counts=COUNT_BYTES * (experts_away * num_experts + others_slices * layout.expert * local),
        # Four transfers: to the experts and back, in forward and in backward.
        rows=4 * experts_away * own * row,
        slices=4 * others_slices * own * row,
    )


def cut_pair_traffic(layout: Layout, *, sequence: bool, tokens: float, hidden_size: int, width: int) -> float:
    """Return the traffic of an attention or dense FFN: a column-parallel product, then a row-parallel one.

    There is one all-reduce of the activations in forward and one in backward. With sequence parallelism there
    are equivalent gathers and reduce-scatters, and one more gather for the gradient of the first weight.
    """
    return (5 if sequence else 4) * _share(layout.tensor) * tokens * hidden_size * width


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks
