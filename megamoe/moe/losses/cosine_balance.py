"""`cosine_balance`: the load-balancing loss of X-MoE, on cosines at a constant temperature."""

from dataclasses import dataclass

from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.kernels.router import masked
from megamoe.moe.compatibility import refuse_all_chosen, refuse_even_selector
from megamoe.moe.losses.squared_cv import fractions, wanted_counts
from megamoe.moe.part import Dims, Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.moe.scorers.temperature import default_temperature
from megamoe.registry import register


@register("loss", "cosine_balance")
class CosineBalance(Part):
    """E * sum_i f_i P_i over the micro batch, P_i the mean over tokens of softmax(cos / tau_0)_i.

    tau_0 is a constant, so that the learned temperature of the scores gets no gradient from here; the softmax
    stands whatever the score function is. Under a mask it runs over the candidates. f_i: the fraction of the
    wanted pairs that go to expert i, without gradient; with `first_choice`, of first choices alone: the
    paper's "how many tokens are routed to the i-th expert" is for one choice, where both agree. Source: Chi
    et al. 2022 (X-MoE) eq. 9; weight and tau_0: appendices A and B. Scope: micro batch; the run's loss is
    the mean of its values on the micro batches.
    """

    @dataclass
    class Config:
        """weight: factor in the total loss. temperature: tau_0; null: 0.07 with a score function that is
        elementwise (`sigmoid`), otherwise 0.3. first_choice: count only each token's first choice."""

        weight: float = 0.01
        temperature: float | None = None
        first_choice: bool = False

        def __post_init__(self) -> None:
            if self.temperature is not None and not self.temperature > 0:
                raise ValueError("temperature must be positive")

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        """Cosines."""
        return {"cosine_TE": "the cosines whose softmax is balanced"}

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        """Counts that the router can change."""
        refuse_even_selector(moe, options.first_choice)
        refuse_all_chosen(moe, options.first_choice)

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        self.temperature = config.temperature or default_temperature(dims.score_function)

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Scalar fp32; 0 without tokens."""
        fraction_E = fractions(wanted_counts(routing, self.config.first_choice))
        mean_prob_E = self._probs_TE(routing).sum(dim=0) / max(routing.num_tokens, 1)
        return routing.num_experts * (fraction_E * mean_prob_E).sum()

    def _probs_TE(self, routing: Routing) -> Tensor:
        scaled_TE = routing.extras["cosine_TE"] / self.temperature
        if routing.candidates_TE is None:
            return scaled_TE.softmax(dim=-1)
        scaled_TE = masked(scaled_TE, routing.candidates_TE, float("-inf"), self.dims.kernels)
        probs_TE = scaled_TE.softmax(dim=-1)
        return masked(
            probs_TE, routing.candidates_TE, 0.0, self.dims.kernels
        )  # NaN where there is no candidate
