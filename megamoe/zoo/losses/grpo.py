"""`grpo`: group-relative policy optimisation of the routing. Experimental."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.errors import UserError
from megamoe.moe.objective import Objective
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Pairs, Routing
from megamoe.registry import register

EPSILON = 1e-4  # added to the standard deviation: rollouts whose losses differ by less hardly count
MOST_ROLLOUTS = 1000
LOG_ZERO = -1e30  # log p of an expert that is no candidate; unlike -inf it has finite gradients


@register("loss", "grpo")
class GRPO(Objective):
    """-J, J = mean over rollouts and tokens of min(r A, clip(r, 1 - c, 1 + c) A) - kl * KL(pi || reference).

    Every sequence is routed G times, with separate draws. A: a token's reward (its negative loss) minus the
    mean over its G rollouts, divided by their population standard deviation; 0 for masked tokens. r = pi(o) /
    pi_old(o), where o are the experts drawn for the token. For k > 1, pi(o) is the probability of the draw
    without replacement, the product of p_j / (1 - the p before it) (Plackett-Luce). KL: the exact sum over
    the candidates of pi log(pi / reference) for a single draw; GRPO, which draws from a vocabulary, estimates
    it (k3). All three policies have the step's candidates. If pi is pi_old, the A of a group cancel: the
    logged value is the KL term alone, but the gradient is not.

    Source: the slides' "RL-based expert routing"; Shao et al. 2024 (GRPO) eq. 3, clip 0.2, kl 0.04.

    Caveats: the slides ascribe this to DeepSeek-R1, whose paper does not describe it, and they do not define
    the reward; the token's own loss is our reading. Effects on the losses of later tokens, and other layers'
    draws, are noise to this loss. A step costs G times as much. Experimental.

    Scope: a mean over tokens, so it does not depend on how the global batch is cut into micro batches of
    equal size.
    """

    @dataclass
    class Config:
        """weight: factor in the total loss. rollouts: G. clip: c. kl: factor of the KL divergence."""

        weight: float = 0.01
        rollouts: int = 4
        clip: float = 0.2
        kl: float = 0.04

        def __post_init__(self) -> None:
            if self.rollouts < 2:
                raise ValueError("rollouts must be at least 2: the advantage compares them")
            if self.rollouts > MOST_ROLLOUTS:
                raise ValueError(f"rollouts must be at most {MOST_ROLLOUTS:,}: a micro batch holds them all")
            if not 0 < self.clip < 1:
                raise ValueError("clip must be above 0 and under 1")
            if self.kl < 0:
                raise ValueError("kl must be at least 0")

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        policy = "which the ratio and the divergence are taken from"
        return {"sampling_scores_TE": policy, "reference_scores_TE": policy, "drawn": "as a policy's are"}

    @property
    def num_rollouts(self) -> int:
        """The number of rollouts G."""
        return int(self.config.rollouts)

    def forward(self, routing: Routing, context: StepContext, token_losses_T: Tensor) -> Tensor:
        """Return a scalar, fp32; token_losses_T: fp32 [T], 0 for masked tokens.

        Raises:
            UserError: if the routing carries no gradient, as under activation recomputation.
        """
        if torch.is_grad_enabled() and not routing.scores_TE.requires_grad:
            raise UserError(
                "moe.losses.grpo: the routing carries no gradient by the time the token losses are known; "
                "set model.recompute: none, and do not freeze the router"
            )
        log_pi_TE = _log_policy_TE(routing.scores_TE, routing)
        log_reference_TE = _log_policy_TE(routing.extras["reference_scores_TE"], routing)
        log_old_TE = _log_policy_TE(routing.extras["sampling_scores_TE"], routing)
        wanted, num_choices = routing.wanted, self.dims.num_choices
        log_drawn_T = _log_drawn_T(log_pi_TE, wanted, num_choices)
        ratio_T = (log_drawn_T - _log_drawn_T(log_old_TE, wanted, num_choices)).exp()
        clipped_T = ratio_T.clamp(1 - self.config.clip, 1 + self.config.clip)
        advantage_T = _advantage_T(token_losses_T, context)
        gain_T = torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
        divergence_T = (log_pi_TE.exp() * (log_pi_TE - log_reference_TE)).sum(dim=-1)
        return (self.config.kl * divergence_T - gain_T).sum() / max(routing.num_tokens, 1)


def _log_policy_TE(scores_TE: Tensor, routing: Routing) -> Tensor:
    """Return the log softmax over the candidates, fp32 [T, E]; LOG_ZERO, without gradient, elsewhere."""
    if routing.candidates_TE is None:
        return scores_TE.log_softmax(dim=-1)
    banned_TE = ~routing.candidates_TE
    return scores_TE.masked_fill(banned_TE, LOG_ZERO).log_softmax(dim=-1).masked_fill(banned_TE, LOG_ZERO)


def _log_drawn_T(log_TE: Tensor, wanted: Pairs, num_choices: int) -> Tensor:
    """Return the log probability of drawing these experts in this order without replacement, fp32 [T].

    The probability left before each draw is summed from the last draw to the first, starting with the experts
    never drawn: 1 - the p before it would cancel for a sharp pi. A draw without a remaining candidate counts
    LOG_ZERO - LOG_ZERO, which is exactly 0.
    """
    drawn_N = log_TE[wanted.token_N, wanted.expert_N]
    log_zero_TK = log_TE.new_full((log_TE.shape[0], num_choices), LOG_ZERO)
    drawn_TK = log_zero_TK.index_put((wanted.token_N, wanted.choice_N), drawn_N)
    taken_TE = torch.zeros_like(log_TE, dtype=torch.bool)
    taken_TE[wanted.token_N, wanted.expert_N] = True
    remaining_T = log_TE.masked_fill(taken_TE, LOG_ZERO).logsumexp(dim=-1)
    total_T = torch.zeros_like(remaining_T)
    for choice in reversed(range(num_choices)):
        remaining_T = torch.logaddexp(remaining_T, drawn_TK[:, choice])
        total_T = total_T + (drawn_TK[:, choice] - remaining_T)
    return total_T


def _advantage_T(token_losses_T: Tensor, context: StepContext) -> Tensor:
    """Return the advantages, fp32 [T]; token s * B + b, with a sequence's rollouts B / G apart."""
    num_rollouts = context.num_rollouts
    reward_SGb = -token_losses_T.reshape(-1, num_rollouts, context.num_sequences // num_rollouts)
    reward_SGb = reward_SGb - reward_SGb[:, :1]  # equal losses give exactly 0, however their mean is rounded
    centred_SGb = reward_SGb - reward_SGb.mean(dim=1, keepdim=True)
    deviation_S1b = centred_SGb.square().mean(dim=1, keepdim=True).sqrt()
    return (centred_SGb / (deviation_S1b + EPSILON)).reshape(-1)
