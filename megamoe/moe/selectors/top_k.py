"""`top_k`: every token goes to the k experts with the largest gating values."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from megamoe.kernels.router import renormalised_weights, top_k
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Pairs, Scored
from megamoe.moe.selectors.choices import FixedK, chosen_shares_TK, only_valid, probs_N, shares_N, valid_TK
from megamoe.registry import register


@register("selector", "top_k")
class TopK(FixedK):
    """The k largest of p, with one of four kinds of weights.

    The choice is by the scores if the score function is monotone and has no bias, otherwise by p plus the
    bias (`Scored.ranking_TE`).

    raw: p itself (Switch, DeepSeek-V2). renormalised: p over the sum of the k chosen (GShard, DeepSeek-V3).
    Sums below 1e-15 are taken from the scores, as fp32 rounds such p to 0; transformers adds 1e-20 to all.
    kept_softmax: softmax over the k chosen scores (Shazeer et al. 2017 eq. 3-5, Softmax(KeepTopK)). one: 1.
    At k = 1 the two normalised kinds are always 1 and give the router no gradient: training refuses them,
    unless the router is frozen (`moe.frozen`).

    `second`, for k = 2 and in training: best, the second largest of p. random: it is sent only if 2 g_2 > u,
    g_2 = p_2 / (p_1 + p_2), u from U(0, 1); the first keeps its weight (GShard: Lepikhin et al. 2021,
    algorithm 1). sampled: the second is drawn from the rest in proportion to p, GShard's alternative.
    Evaluation sends the best two.

    Source: Shazeer et al. 2017 eq. 3-5; Lepikhin et al. 2021 (GShard), algorithm 1; Fedus et al. 2021.
    """

    @dataclass
    class Config(FixedK.Config):
        """k: experts per token. weights, second: see the class. scale: a constant factor on the weights.
        renormalise: whether the weights sum to `scale` over the k chosen experts, or over those that the
        capacity kept (a token of one pair then has weight `scale`, without gradient).
        """

        k: int = 2
        weights: Literal["raw", "renormalised", "kept_softmax", "one"] = "renormalised"
        scale: float = 1.0
        second: Literal["best", "random", "sampled"] = "best"
        renormalise: Literal["before_drops", "after_drops"] = "before_drops"

        def __post_init__(self) -> None:
            super().__post_init__()
            if not self.scale > 0:
                raise ValueError("scale must be positive")
            if self.second != "best" and self.k != 2:
                raise ValueError(
                    f"second: {self.second} is a rule for k: 2, found k: {self.k}; set second: best"
                )
            if self.renormalise == "after_drops" and self.weights != "renormalised":
                raise ValueError(
                    f"renormalise: after_drops needs weights: renormalised, found {self.weights!r}"
                )

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        kind = {"renormalised": "normalised", "kept_softmax": "normalised", "one": "fixed_weights"}
        provided = {"best_k", "by_ranking", "fixed_count", kind.get(options.weights, "best_k")}
        return provided - {"sampled": {"by_ranking"}, "random": {"fixed_count"}}.get(options.second, set())

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        why = "since weights: kept_softmax is taken from the scores themselves"
        return {"plain_softmax": why} if options.weights == "kept_softmax" else {}

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        found = {}
        if options.second == "sampled":
            found["bias"] = "which does not reach the p that the second expert is drawn from"
        if options.renormalise == "after_drops":
            found["dropless"] = "so that renormalise: after_drops would do nothing"
        return found

    @classmethod
    def takes_all(cls, options: Config, num_candidates: int) -> bool:
        return options.second != "random" and options.k >= num_candidates

    def forward(self, scored: Scored, context: StepContext) -> Pairs:
        """T*k pairs; fewer where a token has fewer candidates, or its second is not sent."""
        expert_TK = top_k(scored.ranking_TE, self.config.k, self.dims.kernels)
        second = self.config.second if self.training else "best"
        if second == "sampled":
            expert_TK = self._sample_second(expert_TK, scored.probs_TE.detach(), context)
        valid_TK = scored.candidates_among_TK(expert_TK)
        weight_TK = self._weights(scored, expert_TK, valid_TK, best=True)
        if second == "random":
            sent_TK = self._send_second(scored.probs_TE.detach().gather(1, expert_TK), context)
            valid_TK = sent_TK if valid_TK is None else valid_TK & sent_TK
        return self._pairs(scored, expert_TK, weight_TK, valid_TK)

    @classmethod
    def replays(cls, options: Config) -> bool:
        # The weight of a random second depends on the second expert even where it is not sent.
        return options.second != "random"

    def replayed(self, scored: Scored, expert_TK: Tensor, count_T: Tensor) -> Pairs:
        """Return the pairs of these choices with the weights that the options name."""
        more = max(0, self.config.k - expert_TK.shape[1])  # sums over as many columns have the same bits
        expert_TK = functional.pad(expert_TK, (0, more))
        kept_TK = valid_TK(expert_TK, count_T)
        weight_TK = self._weights(scored, expert_TK, kept_TK)
        return self._pairs(scored, expert_TK, weight_TK, kept_TK)

    def _pairs(self, scored: Scored, expert_TK: Tensor, weight_TK: Tensor, valid_TK: Tensor | None) -> Pairs:
        """Return the pairs, with what `after_drops` needs."""
        pairs = Pairs.of_choices(expert_TK, weight_TK, valid_TK)
        slope = scored.small_slope()
        if self.config.renormalise == "before_drops" or slope is None:
            return pairs
        return replace(pairs, log_N=slope * probs_N(scored.scores_TE, pairs.token_N, pairs.expert_N))

    def after_drops(self, pairs: Pairs) -> Pairs:
        """Return the pairs that the capacity kept, renormalised if the options say so."""
        if self.config.renormalise == "before_drops":
            return pairs
        # The pairs are sorted by token: runs are counted, since the number of tokens is not known here.
        run_N = (pairs.token_N.diff(prepend=pairs.token_N[:1]) != 0).cumsum(0)
        log_N = pairs.log_N
        logs = None if log_N is None else lambda: log_N
        weight_N = shares_N(pairs.weight_N, logs, run_N, len(run_N), self.config.scale)
        return replace(pairs, weight_N=weight_N, log_N=None)

    def _send_second(self, probs_T2: Tensor, context: StepContext) -> Tensor:
        """Return which choices are sent, bool [T, 2]: always the first, and the second if 2 p_2 > u (p_1 +
        p_2).
        """
        bound_T = self.draws(context, "second", probs_T2, 1)[:, 0] * probs_T2.sum(dim=-1)
        return torch.stack([torch.ones_like(bound_T, dtype=torch.bool), 2 * probs_T2[:, 1] > bound_T], dim=1)

    def _sample_second(self, expert_T2: Tensor, probs_TE: Tensor, context: StepContext) -> Tensor:
        """Return the first expert and one drawn from the rest, int64 [T, 2]; the second best if all others
        are 0.
        """
        rest_TE = probs_TE.scatter(1, expert_T2[:, :1], 0.0)
        sum_TE = rest_TE.cumsum(dim=-1)
        total_T = sum_TE[:, -1]
        target_T = self.draws(context, "second", probs_TE, 1)[:, 0] * total_T
        # The p of the expert found is positive, since u < 1.
        drawn_T = torch.searchsorted(sum_TE, target_T[:, None], right=True)[:, 0]
        is_drawn_T = total_T > torch.finfo(total_T.dtype).tiny
        return torch.stack([expert_T2[:, 0], torch.where(is_drawn_T, drawn_T, expert_T2[:, 1])], dim=1)

    def _weights(
        self, scored: Scored, expert_TK: Tensor, kept_TK: Tensor | None, best: bool = False
    ) -> Tensor:
        """Return the weights of choices, of which some may not be kept; best: see `Scored.small_slope`."""
        kind = self.config.weights
        if kind == "renormalised" and kept_TK is None:
            tables = scored.probs_TE, scored.scores_TE, expert_TK
            numbers = scored.small_slope(best), self.config.scale
            return renormalised_weights(*tables, *numbers, self.dims.kernels)
        if kind == "renormalised":
            weight_TK = chosen_shares_TK(scored, expert_TK, kept_TK, best)
        elif kind == "one":
            weight_TK = torch.ones_like(expert_TK, dtype=scored.probs_TE.dtype)
        elif kind == "kept_softmax":
            score_TK = scored.scores_TE.gather(1, expert_TK)
            weight_TK = only_valid(score_TK, kept_TK, float("-inf")).softmax(dim=-1)
        else:
            weight_TK = only_valid(scored.probs_TE.gather(1, expert_TK), kept_TK)
        return weight_TK * self.config.scale
