"""The memory of a rank's model states by ZeRO stage, and the traffic of a layout's MoE layers."""

import operator
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from megamoe.config.schema import Precision
from megamoe.moe.dispatch.fp8 import fp8_row_bytes
from megamoe.parallel.layout import Layout
from megamoe.parallel.zero.deepspeed_config import Offload


@dataclass(frozen=True)
class Share:
    """The parameters of a rank, how many of them are trained, and how many ranks hold the same ones.

    of_muon: how many of the trained ones Muon updates, which has one moment of them, and Adam two. has_mean:
    whether there is an exponential mean of them. moment: bytes of a number of Adam's moments.
    """

    parameters: float
    trained: float
    replicas: int
    of_muon: float = 0
    has_mean: bool = False
    moment: int = 4


@dataclass(frozen=True)
class StateBytes:
    """Bytes of weights, gradients and optimiser state on one rank's device; offloaded states are separate."""

    weights: float
    gradients: float
    optimizer: float
    cpu: float = 0
    nvme: float = 0

    @property
    def total(self) -> float:
        """The total on the device."""
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: "StateBytes") -> "StateBytes":
        return StateBytes(*map(operator.add, astuple(self), astuple(other)))


def state_bytes(
    shares: Iterable[Share],
    stage: int,
    precision: Precision,
    offload: Offload | None = None,
    aside: float = 0,
) -> StateBytes:
    """Return the bytes of model states between two micro batches of a step, when gradients accumulate.

    aside: parameters whose gradients are also held in fp32, to be summed over tensor ranks once per step.

    DeepSpeed's buckets, and weights that a layer gathers at ZeRO 3, are not included.
    tests/distributed/costs/test_memory.py compares the result with the live tensors.
    """
    offload = offload or Offload()
    total = StateBytes(0, 0, 0)
    for share in shares:
        total += _share_bytes(share, stage, precision, offload)
    return total + StateBytes(0, 4 * aside, 0)


def _share_bytes(share: Share, stage: int, precision: Precision, offload: Offload) -> StateBytes:
    width = 4 if precision == "fp32" else 2
    weights = width * share.parameters / (share.replicas if stage == 3 else 1)
    gradients = 4 * share.trained / (share.replicas if stage >= 2 else 1)  # accumulated in fp32
    master = 4 if stage >= 1 or precision != "fp32" else 0
    mine = share.trained / (share.replicas if stage >= 1 else 1)
    moments = 2 * share.moment + 4 * share.has_mean
    optimizer = (moments + master) * mine - 4 * share.of_muon * mine / max(1, share.trained)
    if offload.optimizer == "none":
        return StateBytes(weights, gradients, optimizer)
    return _offloaded(stage, width, offload, weights, gradients, optimizer, mine)


def _offloaded(
    stage: int, width: int, offload: Offload, weights: float, gradients: float, optimizer: float, mine: float
) -> StateBytes:
    """Return the bytes with an offloaded optimiser, which updates where its state is.

    It has its own gradients there, and below ZeRO 3 a copy of the weights that it writes. mine: the
    parameters that this rank updates.
    """
    stepping = optimizer + 4 * mine
    held = 0.0 if stage == 1 else gradients  # ZeRO 1 accumulates on the device
    written = width * mine if stage < 3 else 0.0
    on_device = StateBytes(weights if offload.parameters == "none" else 0, gradients - held, 0)
    cpu, nvme = held + written, 0.0
    if offload.optimizer == "cpu":
        cpu += stepping
    else:
        nvme += stepping
    if offload.parameters == "cpu":
        cpu += weights
    elif offload.parameters == "nvme":
        nvme += weights
    return on_device + StateBytes(0, 0, 0, cpu, nvme)


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


def stage_traffic(layout: Layout, *, sequence: bool, tokens: float, hidden_size: int, width: int) -> float:
    """Return what a rank of a middle pipeline stage sends: hidden states forward, a gradient backward."""
    if layout.pipeline == 1:
        return 0.0
    shards = layout.context * (layout.tensor if sequence else 1)
    return (2 if layout.pipeline > 2 else 1) * tokens / shards * hidden_size * width


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks
