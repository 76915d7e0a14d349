"""What an MoE layer observes of one forward pass: counts and sums on the device, for the routing metrics."""

from dataclasses import dataclass, field

from torch import Tensor

from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.kernels.router_sums import gate_sums
from megamoe.moe.routing import Routing


@dataclass
class Observation:
    """Statistics of one forward pass over the whole micro batch, on the device and without gradient.

    load_E, wanted_E: int64, the pairs that each expert computes and those that the selector chose for it.
    losses: the auxiliary losses by name, unweighted. width_D: int64 [E + 1], the number of tokens that are
    computed by d experts, at place d. entropy: the sum over tokens of the gate entropy, nats. top_1: the sum
    over tokens of the largest share, see `gate_sums`. gradient_squares: by name, filled in by the backward
    pass where it is measured, see `gradient_share`.
    """

    load_E: Tensor
    wanted_E: Tensor
    losses: dict[str, Tensor]
    width_D: Tensor
    entropy: Tensor
    top_1: Tensor
    gradient_squares: dict[str, Tensor] = field(default_factory=dict)


def observe(routing: Routing, losses: dict[str, Tensor], kernels: Kernels = DEFAULT_KERNELS) -> Observation:
    """Return the observation of a micro batch; never waits for the device."""
    load_E = routing.counts_E()
    wanted_E = load_E if routing.wanted is routing.pairs else routing.wanted_counts_E()
    entropy, top_1, width_D = gate_sums(routing.probs_TE, routing.pairs.token_N, kernels)
    return Observation(load_E, wanted_E, losses, width_D, entropy, top_1)
