"""`entropy_aware`: few experts for a token whose probabilities are concentrated, more for the others."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.kernels.router import largest, shares
from megamoe.moe.part import StepContext
from megamoe.moe.routing import LOWEST, Pairs, Scored
from megamoe.moe.selectors.choices import WeightedByP, num_candidates_T, only_valid, probs_N, shares_N
from megamoe.moe.validation import refuse_more_than_experts
from megamoe.registry import register


@register("selector", "entropy_aware")
class EntropyAware(WeightedByP):
    """A token's best m experts, where m is the perplexity of its p: round(exp(H(p))) within [min_k, max_k].

    H is the entropy in nats of p over the candidates, divided by their sum if it is not 1 (sigmoid, or a
    softmax over all experts under a mask). exp(H) is the effective number of experts: 1 if one expert has all
    of p, n if p is even over n experts. Weights: raw, p itself; renormalised, p over the sum of the m chosen,
    which is 1 for a token of one expert and then gives the router no gradient. The capacity counts with k =
    1.

    Source: Dubois 2025, lecture slides on mixture of experts, "Entropy Aware Gating"; they give no formula,
    and the perplexity, rounded to the nearest integer, is our reading.
    """

    @dataclass
    class Config:
        """min_k, max_k: bounds on the experts per token. weights: see the class."""

        min_k: int = 1
        max_k: int = 4
        weights: Literal["raw", "renormalised"] = "raw"

        def __post_init__(self) -> None:
            if not 1 <= self.min_k <= self.max_k:
                raise ValueError("min_k must be at least 1 and at most max_k")
            if self.max_k == 1 and self.weights == "renormalised":
                raise ValueError(
                    "with max_k: 1 the weights 'renormalised' are always 1 and the router would get no "
                    "gradient; set weights: raw"
                )

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        refuse_more_than_experts("max_k", options.max_k, moe)

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        return {"normalised"} if options.weights == "renormalised" else set()

    @classmethod
    def wanted(cls, options: Config, num_experts: int) -> int:
        return int(options.min_k)

    def forward(self, scored: Scored, context: StepContext) -> Pairs:
        """Return min_k to max_k pairs per token, fewer if it has fewer candidates."""
        probs_TE = scored.probs_TE.detach()
        slope = scored.small_slope(best=True)
        score_TE, among_TE = scored.scores_TE.detach(), scored.candidates_TE
        logs = None if slope is None else lambda: only_valid(slope * score_TE, among_TE, LOWEST)
        share_TE = shares(probs_TE, logs)
        perplexity_T = torch.special.entr(share_TE).sum(dim=-1).exp()
        wanted_T = perplexity_T.round().long().clamp(self.config.min_k, self.config.max_k)
        count_T = wanted_T.minimum(num_candidates_T(scored.candidates_TE, probs_TE))
        expert_TK = largest(scored.ranking_TE, self.config.max_k)
        return self.replayed(scored, expert_TK, count_T)

    def replayed(self, scored: Scored, expert_TK: Tensor, count_T: Tensor) -> Pairs:
        """Return the pairs of these choices with the weights that the options name."""
        pairs = super().replayed(scored, expert_TK, count_T)
        if self.config.weights == "renormalised":
            slope = scored.small_slope()
            where = pairs.token_N, pairs.expert_N
            logs = None if slope is None else lambda: slope * probs_N(scored.scores_TE, *where)
            sizes = pairs.token_N, scored.num_tokens, 1.0
            pairs.weight_N = shares_N(pairs.weight_N, logs, *sizes)
        return pairs
