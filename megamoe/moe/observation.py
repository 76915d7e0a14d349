"""What an MoE layer observes of a pass: counts and sums for the metrics."""

from dataclasses import dataclass

from torch import Tensor

from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.kernels.router import gate_sums
from megamoe.moe.routing import Routing


@dataclass
class Observation:
    """Statistics of one forward pass over the whole micro batch, on the device and without gradient.

    load_E, wanted_E: int64, the pairs that each expert computes and those that the selector chose for it;
    wanted_E goes on with the experts without computation (`moe.zero_experts`). losses: the auxiliary losses
    by name, unweighted. width_D: int64 [len(wanted_E) + 1], the number of tokens that are computed by d
    experts, at place d. entropy: the sum over tokens of the gate entropy, nats. top_1: the sum
    over tokens of the largest share, see `gate_sums`.
    """

    load_E: Tensor
    wanted_E: Tensor
    losses: dict[str, Tensor]
    width_D: Tensor
    entropy: Tensor
    top_1: Tensor


def observe(
    routing: Routing,
    losses: dict[str, Tensor],
    kernels: Kernels = DEFAULT_KERNELS,
    real: Routing | None = None,
) -> Observation:
    """Return the observation of a micro batch; never waits for the device.

    real: the routing to the experts that compute, if there are others.
    """
    real = real or routing
    load_E = real.counts_E()
    wanted_E = load_E if real.pairs is routing.wanted else routing.wanted_counts_E()
    pairs = real.pairs if real.slots is None else real.wanted
    entropy, top_1, width_D = gate_sums(routing.probs_TE, pairs.token_N, kernels)
    if real.slots is not None:
        width_D = real.width_D()
    return Observation(load_E, wanted_E, losses, width_D, entropy, top_1)
