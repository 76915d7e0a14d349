"""How much memory a rank's model states need: weights, gradients, optimiser state, by ZeRO stage."""

from dataclasses import dataclass

from megamoe.parallel.deepspeed_config import Precision


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Sum of all."""
        return self.weights + self.gradients + self.optimizer


def state_bytes(
    dense: int,
    experts: int,
    stage: int,
    precision: Precision,
    data_parallel: int,
    expert_parallel: int,
    frozen_experts: bool = False,
) -> StateBytes:
    """Model states of one rank; `dense` and `experts` count the whole model's parameters.

    AdamW keeps two fp32 moments; bf16, and ZeRO in any precision, an fp32 master besides. ZeRO 1 and 2
    cut optimiser state (2: gradients too) over the ranks that hold the same parameters. Frozen experts
    are weights alone.
    """
    total = StateBytes(0, 0, 0)
    here = experts / expert_parallel
    parts = (
        (dense, dense, data_parallel),
        (here, 0 if frozen_experts else here, data_parallel // expert_parallel),
    )
    for parameters, trained, replicas in parts:
        cut = replicas if stage >= 1 else 1
        master = 4 if precision == "bf16" or stage >= 1 else 0
        weights = (2 if precision == "bf16" else 4) * parameters
        gradients = 4 * trained / (replicas if stage >= 2 else 1)  # accumulated in fp32
        optimizer = (8 + master) * trained / cut
        total = StateBytes(total.weights + weights, total.gradients + gradients, total.optimizer + optimizer)
    return total
