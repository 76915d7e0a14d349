"""`strictly_balanced`: the experts choose their tokens in training, and by learned thresholds afterwards."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megamoe.config.schema import MoEConfig
from megamoe.kernels.router import largest
from megamoe.moe.part import Dims, Selector, StepContext
from megamoe.moe.routing import Pairs, Scored
from megamoe.moe.selectors.choices import first_choices, probs_N, shares_N, whole_batch
from megamoe.moe.validation import refuse_more_than_experts
from megamoe.registry import register


@register("selector", "strictly_balanced")
class StrictlyBalanced(Selector):
    """The strictly balanced gate, with p = softmax(x W_g) and the mask M:

        G_i(x) = p_i M_i / sum_j p_j M_j                                                    (eq. 16)
        training: M_i = 1 for the m = ceil(k |X| / E) tokens of the batch X with the largest p_i   (eq. 18)
        evaluation: M_i = 1 if p_i > t_i                                                    (eq. 19)

    So in training every expert has m tokens, and a token has between 0 and E experts, k on average. The loss
    `batchwise_threshold` teaches the thresholds t, which start at 1/E. In evaluation a token's experts depend
    on that token alone. X has the tokens of all data-parallel ranks' micro batches, whose p every rank
    gathers: in the paper "each expert in the MoE layer receives a combined batch" of them (section 3.1).

    Source: Shazeer et al. 2017 (SGMoE), appendix F. It leaves open how m is rounded, the start of t, and how
    two levels of experts are balanced; this gate has one.

    In training the choice depends on all tokens of the batch, including later ones. ZeRO 3 is refused: the
    backward pass of the loss would find t cut over the ranks.
    """

    experts_alike = True

    @dataclass
    class Config:
        """k: mean experts per token."""

        k: int = 4

        def __post_init__(self) -> None:
            if self.k < 1:
                raise ValueError("k must be at least 1")

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        return {"threshold_E", "by_experts", "even_load", "over_all_ranks"}

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        return {
            "softmax_of_scores": "which an expert compares between tokens",
            "dropless": "since the loads are even already",
        }

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        return {
            "mask": "but every expert must be free to take every token for the loads to be even",
            "bias": "but it would be the same for all tokens among which an expert chooses",
        }

    @classmethod
    def must_be_required(cls, options: Config) -> dict[tuple[str, str], str]:
        return {("loss", "threshold_E"): "which teaches the thresholds of evaluation"}

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        refuse_more_than_experts("k", options.k, moe)

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        self.threshold = nn.Parameter(torch.full((dims.num_experts,), 1 / dims.num_experts))

    @property
    def mean_choices(self) -> float:
        """The mean number of experts per token."""
        return float(self.config.k)

    def metrics(self) -> dict[str, Tensor]:
        """Return the mean threshold."""
        return {"threshold": self.threshold.float().mean()}

    def forward(self, scored: Scored, context: StepContext) -> Pairs:
        """Return the pairs of both masks, weighted by G; adds the extra threshold_E, fp32 with gradient."""
        threshold_E = scored.extras["threshold_E"] = self.threshold.float().clone()
        value_TE = scored.across_tokens_TE(scored.probs_TE)
        chosen_TE = self._batchwise_TE(value_TE, context) if self.training else value_TE > threshold_E
        expert_TE = value_TE.masked_fill(~chosen_TE, -1.0).argsort(dim=-1, descending=True, stable=True)
        pairs = first_choices(expert_TE, chosen_TE.sum(dim=-1), scored.probs_TE)
        log_TE = (scored.small_slope() or 1.0) * scored.scores_TE
        cells, sizes = (pairs.token_N, pairs.expert_N), (pairs.token_N, scored.num_tokens, 1.0)
        weight_N = shares_N(pairs.weight_N, lambda: probs_N(log_TE, *cells), *sizes)
        return replace(pairs, weight_N=weight_N)

    def _batchwise_TE(self, value_TE: Tensor, context: StepContext) -> Tensor:
        """Return the mask of training, bool [T, E]; all ranks of the data group must call it."""
        value_XE, own_T = whole_batch(value_TE, context)
        most = -(-self.config.k * len(value_XE) // self.dims.num_experts)
        best_Em = largest(value_XE.T, most)
        chosen_EX = torch.zeros_like(value_XE.T, dtype=torch.bool).scatter(1, best_Em, True)
        return chosen_EX.T[own_T]
