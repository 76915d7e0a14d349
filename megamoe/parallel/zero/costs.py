"""The memory of a rank's model states by ZeRO stage."""

import operator
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from megamoe.config.schema import Precision
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
