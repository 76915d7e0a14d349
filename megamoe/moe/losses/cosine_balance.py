"""`cosine_balance`: the load-balancing loss of X-MoE, on cosines with a constant temperature."""

from dataclasses import dataclass

from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe.losses.common import fractions, wanted_counts
from megamoe.moe.part import Dims, Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.moe.scorers.common import default_temperature
from megamoe.moe.validation import refuse_all_chosen, refuse_even_selector
from megamoe.registry import register


@register("loss", "cosine_balance")
class CosineBalance(Part):
    """E * sum_i f_i P_i over the micro batch, with P_i the mean over tokens of softmax(cos / tau_0)_i.

    tau_0 is constant, so the learned temperature of the scores gets no gradient from this loss. The softmax
    is used with every score function; under a mask it runs over the candidates. f_i: the fraction of the
    wanted pairs that go to expert i, without gradient; with `first_choice`, of first choices only. The
    paper's "how many tokens are routed to the i-th expert" assumes one choice, for which both are the same.

    Source: Chi et al. 2022 (X-MoE) eq. 9; weight and tau_0: appendices A and B.

    Scope: micro batch; the run's loss is the mean over its micro batches.
    """

    experts_alike = True

    @dataclass
    class Config:
        """weight: factor in the total loss. temperature: tau_0; null: 0.07 with an elementwise score function
        (`sigmoid`), otherwise 0.3. first_choice: count only each token's first choice.
        """

        weight: float = 0.01
        temperature: float | None = None
        first_choice: bool = False

        def __post_init__(self) -> None:
            if self.temperature is not None and not self.temperature > 0:
                raise ValueError("temperature must be positive")

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        return {"cosine_TE": "the cosines whose softmax is balanced"}

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        return {
            "scores_before": "so that choices do not follow the cosines, which alone the loss would change; "
            "take the loss switch_balance"
        }

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        refuse_even_selector(moe, options.first_choice)
        refuse_all_chosen(moe, options.first_choice)

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        self.temperature = config.temperature or default_temperature(dims.score_function)

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Return a scalar, fp32; 0 if there are no tokens."""
        fraction_E = fractions(wanted_counts(routing, self.config.first_choice))
        mean_prob_E = self._probs_TE(routing).sum(dim=0) / max(routing.num_tokens, 1)
        return routing.num_experts * (fraction_E * mean_prob_E).sum()

    def _probs_TE(self, routing: Routing) -> Tensor:
        scaled_TE, kernels = routing.extras["cosine_TE"] / self.temperature, self.dims.kernels
        probs_TE = routing.of_candidates_TE(scaled_TE, float("-inf"), kernels).softmax(dim=-1)
        return routing.of_candidates_TE(probs_TE, 0.0, kernels)  # NaN where there is no candidate
