"""`load`: every expert shall get the same number of tokens, by a smooth estimate of that number."""

from dataclasses import dataclass

from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.kernels.router import masked
from megamoe.moe.compatibility import experts_wanted, most_candidates
from megamoe.moe.losses.choice_probability import choice_probability
from megamoe.moe.losses.squared_cv import squared_cv
from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.registry import register


@register("loss", "load")
class Load(Part):
    """CV(Load)^2, Load_i = sum over tokens of P_i(x); 0 at perfect balance.

    P_i(x) = Phi((clean_i - kth_excluding(H(x), k, i)) / std_i): the probability that expert i is among the
    k best when its own noise is drawn anew and that of the others stays. H: the noisy scores, through which
    the gradient also runs; kth_excluding: the k-th largest of H without component i; std_i: the noise's
    standard deviation with its floor, at least 1e-6. In evaluation H is the clean score, and P what noise
    would make of it; public code counts the pairs there instead.
    Under a mask both k-th score and P are of the candidates: the others have P = 0, and all candidates
    have P = 1 where there are no more than k. A score function's bias is not seen. Source: Shazeer et al.
    2017 (SGMoE) appendix A, eq. 8-11; variance of the population, see `importance`. Scope: micro batch; the
    run's loss is the mean of its values on the micro batches.
    """

    @dataclass
    class Config:
        """weight: factor in the total loss."""

        weight: float = 0.1

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        """Noisy scores, and a choice of the best of them."""
        return {
            "noise_std_TE": "the noise by which the load is estimated",
            "clean_TE": "the scores without noise",
            "best_k": "for which the load is estimated",
        }

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        """A number of choices that leaves some experts out."""
        k, most = experts_wanted(moe), most_candidates(moe)
        if k >= most:
            raise ValueError(
                f"with k: {k} of {most} experts every load is the same; choose "
                f"moe.router.selector.k < {most}, or leave this loss out"
            )

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Scalar fp32; 0 without tokens."""
        scores_TE, candidates_TE = routing.scores_TE, routing.candidates_TE
        if candidates_TE is not None:
            scores_TE = masked(scores_TE, candidates_TE, float("-inf"), self.dims.kernels)
        level = [routing.extras["clean_TE"], scores_TE, routing.extras["noise_std_TE"]]
        chance_TE = choice_probability(level, self.dims.num_choices)
        if candidates_TE is not None:
            chance_TE = masked(chance_TE, candidates_TE, 0.0, self.dims.kernels)
        return squared_cv(chance_TE.sum(dim=0))
