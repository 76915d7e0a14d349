"""`sinkhorn`: top-k of scores balanced by a few Sinkhorn iterations."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.kernels.router import largest
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Pairs, Scored
from megamoe.moe.selectors.choices import FixedK
from megamoe.registry import register

MOST_ITERATIONS = 10_000


@register("selector", "sinkhorn")
class Sinkhorn(FixedK):
    """In training the k largest of a_t exp(s_te) b_e, with a and b such that rows and columns have equal
    sums.

    Sinkhorn's iterations scale rows (to 1 / T) and columns (to 1 / E) in turn, over the micro batch of one
    data-parallel rank. A row's factor does not change its token's choice, so only b matters. The weight is p
    of the unbalanced score function; evaluation is plain top-k, as in `top_k`. In training the choice depends
    on all tokens of the micro batch, including later ones.

    Source: Clark et al. 2022, Unified Scaling Laws for Routed Language Models (S-BASE); Megatron-Core's
    `sinkhorn`.

    Megatron iterates until the mean change of b is below 1e-4, which makes the host wait for the GPU after
    each iteration; here the number of iterations is fixed. Megatron takes sigmoid(s) as p at k = 1 and a
    softmax above; here the score function decides. Megatron refuses auxiliary losses with it; here they are
    allowed.
    """

    experts_alike = True

    @dataclass
    class Config(FixedK.Config):
        """k: experts per token. iterations: the number of Sinkhorn iterations, rows and columns each."""

        iterations: int = 10

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.iterations < 1:
                raise ValueError("iterations must be at least 1; for none choose top_k")
            if self.iterations > MOST_ITERATIONS:
                raise ValueError(f"iterations must be at most {MOST_ITERATIONS:,}: far fewer converge")

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        return {"assigned", "fixed_count"}

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        return {"bias": "which the iterations would undo"}

    def forward(self, scored: Scored, context: StepContext) -> Pairs:
        """Return T * k pairs, fewer if a token has fewer candidates."""
        ranking_TE, candidates_TE = scored.ranking_TE, scored.candidates_TE
        if self.training:
            scores_TE = scored.scores_TE.detach()
            scores_TE = scored.of_candidates_TE(scores_TE, float("-inf"), self.dims.kernels)
            ranking_TE = scores_TE + log_column_factors_E(scores_TE, self.config.iterations)
        expert_TK = largest(ranking_TE, self.config.k)
        valid_TK = None if candidates_TE is None else candidates_TE.gather(1, expert_TK)
        return Pairs.of_choices(expert_TK, scored.probs_TE.gather(1, expert_TK), valid_TK)


def log_column_factors_E(scores_TE: Tensor, iterations: int) -> Tensor:
    """Return log b, fp32 [E], after this many iterations on exp(scores_TE); -inf marks a non-candidate."""
    tiny = torch.finfo(scores_TE.dtype).tiny
    num_tokens, num_experts = scores_TE.shape
    top_T1 = scores_TE.amax(dim=-1, keepdim=True).nan_to_num(neginf=0.0)
    cost_TE = (scores_TE - top_T1).exp()  # a absorbs a row's factor; exp cannot overflow
    factor_E = cost_TE.new_ones(num_experts)
    for _ in range(iterations):
        row_T = 1 / (num_tokens * (cost_TE @ factor_E).clamp_min(tiny))
        factor_E = 1 / (num_experts * (row_T @ cost_TE).clamp_min(tiny))
    return factor_E.log()
