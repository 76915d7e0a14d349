"""What an MoE layer observes of one forward pass: counts and sums on the device, for the routing metrics."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megamoe.moe.routing import Routing, count

SMALLEST = torch.finfo(torch.float32).tiny


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


@torch.no_grad()
def observe(routing: Routing, losses: dict[str, Tensor]) -> Observation:
    """Return the observation of a micro batch; never waits for the device."""
    load_E = routing.counts_E()
    wanted_E = load_E if routing.wanted is routing.pairs else routing.wanted_counts_E()
    num_experts = routing.num_experts
    # Tables may name an expert twice for a token.
    width_T = count(routing.pairs.token_N, routing.num_tokens).clamp_(max=num_experts)
    entropy, top_1 = gate_sums(routing.probs_TE)
    return Observation(load_E, wanted_E, losses, count(width_T, num_experts + 1), entropy, top_1)


def gate_sums(probs_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums over tokens of the gate entropy, -sum_i q_i ln q_i in nats, and of max_i q_i.

    q_i = p_i / sum_j p_j are a token's shares over its candidates; p may be a softmax, sigmoids or another
    score function's values. probs_TE: fp32, at least 0.
    """
    total_T = probs_TE.sum(1).clamp_(min=SMALLEST)
    entropy_T = torch.addcdiv(total_T.log(), _minus_p_ln_p(probs_TE).sum(1), total_T)
    return entropy_T.sum(), (probs_TE.amax(1) / total_T).sum()


def _minus_p_ln_p(probs_TE: Tensor) -> Tensor:
    """Return -p ln p, 0 at p = 0; on the CPU `log` uses vector instructions and `entr` does not."""
    if probs_TE.device.type == "cpu":
        return probs_TE.clamp(min=SMALLEST).log_().mul_(probs_TE).neg_()
    return torch.special.entr(probs_TE)
