"""`load`: balances a smooth estimate of the number of tokens of every expert."""

from dataclasses import dataclass

from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe.losses.common import choice_probability, squared_cv
from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.moe.validation import experts_wanted, most_candidates
from megamoe.registry import register


@register("loss", "load")
class Load(Part):
    """CV(Load)^2, Load_i = sum over tokens of P_i(x); 0 at perfect balance.

    P_i(x) = Phi((clean_i - kth_excluding(H(x), k, i)) / std_i): the probability that expert i is among the k
    best if its own noise is drawn again and the others' noise stays. H: the noisy scores, which also carry
    gradient; kth_excluding: the k-th largest of H without component i; std_i: the noise's standard deviation
    with its floor, at least 1e-6. In evaluation H is the clean score, and P is the probability under noise;
    public code counts the pairs there instead. Under a mask the k-th score and P are those of the candidates:
    the others have P = 0, and all candidates have P = 1 if there are at most k. A score function's bias is
    ignored.

    Source: Shazeer et al. 2017 (SGMoE) appendix A, eq. 8-11; population variance, see `importance`.

    Scope: micro batch; the run's loss is the mean over its micro batches.
    """

    experts_alike = True

    @dataclass
    class Config:
        """weight: factor in the total loss."""

        weight: float = 0.1

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        return {
            "noise_std_TE": "the noise by which the load is estimated",
            "clean_TE": "the scores without noise",
            "best_k": "for which the load is estimated",
        }

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        k, most = experts_wanted(moe), most_candidates(moe)
        if k >= most:
            raise ValueError(
                f"with k: {k} of {most} experts every load is the same; choose "
                f"moe.router.selector.k < {most}, or leave this loss out"
            )

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Return a scalar, fp32; 0 if there are no tokens."""
        kernels = self.dims.kernels
        scores_TE = routing.of_candidates_TE(routing.scores_TE, float("-inf"), kernels)
        level = [routing.extras["clean_TE"], scores_TE, routing.extras["noise_std_TE"]]
        chance_TE = choice_probability(level, self.dims.num_choices)
        return squared_cv(routing.of_candidates_TE(chance_TE, 0.0, kernels).sum(dim=0))
