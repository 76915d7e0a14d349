"""`relu_sparsity`: holds the number of experts of a token at k where every positive score is a choice."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Routing
from megamoe.moe.validation import refuse_more_than_experts
from megamoe.registry import register
from megamoe.zoo.losses.adaptive import AdaptiveLoss


@register("loss", "relu_sparsity")
class ReluSparsity(AdaptiveLoss):
    """c times the mean over tokens of sum_e f_e p_e; c holds the mean number of experts of a token at k.

    After each step c is multiplied by alpha^sign((1 - k/E) - S), where S is the share of zeros: of (token,
    expert) cells of the global batch that are no wanted pair. f_e = E / (k T) times the wanted pairs of
    expert e with `balance` (the load-weighted form); 1 without. f has no gradient.

    Source: Wang et al. 2024 (ReMoE, arXiv 2412.14711), sections 3.3 and 3.4, eq. 7-10; lambda_0 1e-8, alpha
    1.2.

    Caveats: the paper has one lambda, from the mean of S over all layers, and divides by their number. Ours
    has one for each layer, which holds k in that layer; the factor 1/L is left to lambda. T is of the micro
    batch. Padding and masks count as zeros of their experts only where tokens are routed.
    """

    experts_alike = True

    @dataclass
    class Config:
        """weight: lambda_0, the factor in the total loss of the first step. k: the mean experts per token to
        hold. alpha: the change of lambda per step. balance: the load-weighted form.
        """

        weight: float = 1e-8
        k: float = 1.0
        alpha: float = 1.2
        balance: bool = True

        def __post_init__(self) -> None:
            if not self.alpha > 1:
                raise ValueError("alpha must be above 1")
            if not self.k > 0:
                raise ValueError("k must be positive")

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        return {"may_choose_none": "since a smaller p must be able to end a choice (above, at_least: 0)"}

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        return {"sums_to_1": "and the sum of p that the loss lowers is fixed"}

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        refuse_more_than_experts("k", options.k, moe)

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Return a scalar, fp32; 0 if there are no tokens."""
        wanted_E = routing.wanted_counts_E()
        num_tokens, num_experts = routing.probs_TE.shape
        self.remember([wanted_E.sum(), num_tokens], context)
        prob_E = routing.probs_TE.sum(dim=0) / max(num_tokens, 1)
        if self.config.balance:
            prob_E = prob_E * (wanted_E * (num_experts / (self.config.k * max(num_tokens, 1))))
        # A copy: the buffer changes in place.
        return prob_E.sum() * self.coefficient.float().clone()

    def adapted(self, coefficient: Tensor, total: Tensor) -> Tensor:
        """Raise c if a token has more than k experts on average."""
        pairs, num_tokens = total.double().unbind()
        # (1 - k/E) - S has the sign of pairs - k tokens.
        factor = torch.pow(self.config.alpha, (pairs - self.config.k * num_tokens).sign()).float()
        # Of smaller numbers a factor of 1.2 is rounded away, and 0 times infinity is no number.
        limits = torch.finfo(torch.float32)
        return (coefficient * factor).clamp(limits.tiny, limits.max)
