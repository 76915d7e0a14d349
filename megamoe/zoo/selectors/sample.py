"""`sample`: every token draws its experts at random."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megamoe.kernels.router import largest
from megamoe.moe import rng
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Pairs, Scored
from megamoe.moe.selectors.choices import FixedK, chosen_shares_TK, valid_TK
from megamoe.registry import register


@register("selector", "sample")
class Sample(FixedK):
    """In training k experts drawn without replacement in proportion to p; in evaluation the k largest.

    The k largest of log p + Gumbel noise are such a draw, in its order (Gumbel top-k: Kool et al. 2019), from
    a Plackett-Luce model. With a monotone score function log p comes from the scores, so that p too small for
    fp32 are still drawn in proportion. If the scorer gives `sampling_scores_TE`, their softmax replaces p in
    the draw (`policy`: pi_old). Weights: raw p, renormalised to sum 1 over the chosen, or one.

    Source: the slides' policy o ~ pi_old; GShard draws its second expert in this way.
    """

    @dataclass
    class Config(FixedK.Config):
        """k: experts per token. weights: see the class."""

        weights: Literal["raw", "renormalised", "one"] = "raw"

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.k == 1 and self.weights == "renormalised":
                raise ValueError(
                    "with k: 1 the weights 'renormalised' are always 1 and the router would get no gradient; "
                    "set weights: raw"
                )

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        kinds = {"renormalised": {"normalised"}, "one": {"fixed_weights"}}
        return {"drawn", "fixed_count"} | kinds.get(options.weights, set())

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        return {"bias": "which does not reach the p that experts are drawn from"}

    def forward(self, scored: Scored, context: StepContext) -> Pairs:
        """Return T * k pairs in the order drawn, fewer if a token has fewer candidates."""
        keys_TE = self._drawn_TE(scored, context) if self.training else scored.ranking_TE
        expert_TK = largest(keys_TE, self.config.k)
        valid_TK = None if scored.candidates_TE is None else scored.candidates_TE.gather(1, expert_TK)
        return Pairs.of_choices(expert_TK, self._weights_TK(scored, expert_TK, valid_TK), valid_TK)

    def replayed(self, scored: Scored, expert_TK: Tensor, count_T: Tensor) -> Pairs:
        """Return the pairs of these choices, weighted as those drawn."""
        kept_TK = valid_TK(expert_TK, count_T)
        return Pairs.of_choices(expert_TK, self._weights_TK(scored, expert_TK, kept_TK), kept_TK)

    def _drawn_TE(self, scored: Scored, context: StepContext) -> Tensor:
        """Return the log probabilities plus the noise, fp32 [T, E]; -inf for non-candidates."""
        logs_TE = scored.extras.get("sampling_scores_TE")
        score_function = scored.monotone_score_function
        if logs_TE is None and score_function is not None:
            logs_TE = score_function.log_values(scored.scores_TE.detach())
        elif logs_TE is None:
            probs_TE = scored.probs_TE.detach()
            logs_TE = probs_TE.clamp_min(torch.finfo(probs_TE.dtype).tiny).log()
        keys_TE = logs_TE + self.draws(context, "sample", logs_TE, scored.num_experts, rng.gumbel)
        return scored.of_candidates_TE(keys_TE, float("-inf"), self.dims.kernels)

    def _weights_TK(self, scored: Scored, expert_TK: Tensor, kept_TK: Tensor | None) -> Tensor:
        if self.config.weights == "renormalised":
            return chosen_shares_TK(scored, expert_TK, kept_TK)
        prob_TK = scored.probs_TE.gather(1, expert_TK)
        return prob_TK if self.config.weights == "raw" else torch.ones_like(prob_TK)
