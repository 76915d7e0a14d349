"""The router of a megamoe decoder in evaluation: scorer, group limit, score function, selector.

Suffixes of tensors' names are their dimensions: T tokens, H hidden size, E experts, K choices, L groups of
neighbouring experts, M experts of a group, V vocabulary. All is computed in fp32.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megamoe.apps.hf.custom.configuration_megamoe import MegamoeConfig

SMALL_TOTAL = 1e-15  # the p of smaller sums may have underflowed
LOWEST = torch.finfo(torch.float32).min


class Scorer(nn.Module):
    """A score of each expert for each token.

    linear: W x (+ b). cosine: cos(W x, e) / tau (X-MoE). hash: a table of tokens (Hash Layers).
    """

    def __init__(self, config: MegamoeConfig) -> None:
        super().__init__()
        self.kind, self.options = config.router["scorer"], config.router["scorer_options"]
        experts, hidden, options = config.num_experts, config.hidden_size, self.options
        self.num_experts = experts
        self.weight: nn.Parameter | None
        self.table_KV: Tensor
        if self.kind == "hash":
            self.register_buffer("table_KV", torch.empty(options["k"], config.vocab_size, dtype=torch.int64))
        elif self.kind == "cosine":
            size = options["routing_dim"] if options["reduction"] else hidden
            self.weight = nn.Parameter(torch.empty(size, hidden)) if options["reduction"] else None
            self.embedding = nn.Parameter(torch.empty(experts, size))
            self.log_temperature = nn.Parameter(torch.empty(1)) if options["has_temperature"] else None
        else:
            self.weight = nn.Parameter(torch.empty(experts, hidden))
            self.bias = nn.Parameter(torch.empty(experts)) if options.get("bias") else None

    def forward(self, hidden_TH: Tensor, ids_T: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return scores [T, E], and the table's experts [T, K]."""
        if self.kind == "hash":
            table_TK = self.table_KV[:, ids_T].T
            zeros_TE = torch.zeros(len(ids_T), self.num_experts, device=ids_T.device)
            return zeros_TE.scatter(1, table_TK, 1.0), table_TK
        if self.kind == "cosine":
            return self._cosine_TE(hidden_TH), None
        assert self.weight is not None
        scores_TE = functional.linear(hidden_TH, self.weight.float())
        return (scores_TE if self.bias is None else scores_TE + self.bias.float()), None

    def _cosine_TE(self, hidden_TH: Tensor) -> Tensor:
        token_TD = hidden_TH if self.weight is None else functional.linear(hidden_TH, self.weight.float())
        embedding_ED = self.embedding.float()
        if self.options["normalise"]:
            token_TD, embedding_ED = (
                functional.normalize(side, dim=-1, eps=1e-12) for side in (token_TD, embedding_ED)
            )
        scores_TE = functional.linear(token_TD, embedding_ED)
        return scores_TE if self.log_temperature is None else scores_TE / self.log_temperature.float().exp()


class ScoreFunction(nn.Module):
    """softmax or sigmoid of score / temperature, and perhaps a bias that only the choice reads."""

    def __init__(self, config: MegamoeConfig) -> None:
        super().__init__()
        self.kind, self.options = config.router["score_function"], config.router["score_function_options"]
        self.is_elementwise = self.kind == "sigmoid"
        if self.options["has_bias"]:
            self.register_buffer("bias", torch.empty(config.num_experts, dtype=torch.float32))
        else:
            self.bias = None

    def forward(self, scores_TE: Tensor, candidates_TE: Tensor | None) -> Tensor:
        """Return p, [T, E]; 0 for experts that are no candidates."""
        scores_TE = scores_TE / self.options["temperature"]
        if self.kind == "softmax" and candidates_TE is not None and self.options["over"] == "candidates":
            scores_TE = scores_TE.masked_fill(~candidates_TE, -math.inf)
        probs_TE = scores_TE.softmax(dim=-1) if self.kind == "softmax" else scores_TE.sigmoid()
        return probs_TE if candidates_TE is None else probs_TE.masked_fill(~candidates_TE, 0.0)

    def log_values(self, scores: Tensor) -> Tensor:
        """Return log p, with softmax up to a number of the token."""
        scores = scores / self.options["temperature"]
        return scores if self.kind == "softmax" else functional.logsigmoid(scores)


class Router(nn.Module):
    """From hidden states to the chosen experts and their weights."""

    def __init__(self, config: MegamoeConfig) -> None:
        super().__init__()
        self.scorer, self.score_function = Scorer(config), ScoreFunction(config)
        self.limit: dict[str, Any] | None = config.router["group_limit"]
        self.choice: str = config.router["selector"]
        self.options: dict[str, Any] = config.router["selector_options"]

    def forward(self, hidden_TH: Tensor, ids_BS: Tensor, is_token_BS: Tensor) -> tuple[Tensor, ...]:
        """Return which experts compute a token, bool [T, E], with which weights, and logits, fp32 [T, E]."""
        scores_TE, table_TK = self.scorer(hidden_TH.float(), ids_BS.flatten())
        bias_E, candidates_TE = self.score_function.bias, None
        ranking_TE = scores_TE if bias_E is None else self.score_function(scores_TE, None) + bias_E
        if self.limit is not None:
            candidates_TE = self._candidates(ranking_TE)
            ranking_TE = ranking_TE.masked_fill(~candidates_TE, -math.inf)
        probs_TE = self.score_function(scores_TE, candidates_TE)
        if self.choice == "threshold":
            chosen_TE, weight_TE = self._threshold(ranking_TE, probs_TE), probs_TE
        elif self.choice == "entropy_aware":
            chosen_TE, weight_TE = self._entropy_aware(scores_TE, ranking_TE, probs_TE, candidates_TE)
        else:
            if self.choice == "table":
                scale, expert_TK = self.options["scale"], table_TK
                weight_TK = torch.full_like(table_TK, scale, dtype=torch.float32)
            else:
                expert_TK = ranking_TE.topk(self.options["k"], dim=-1).indices
                weight_TK = self._weights(scores_TE, probs_TE, candidates_TE, expert_TK)
            # One expert may be in several tables: its weights add up.
            weight_TE = torch.zeros_like(scores_TE).scatter_add(1, expert_TK, weight_TK)
            chosen_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, expert_TK, True)
        if candidates_TE is not None:
            chosen_TE = chosen_TE & candidates_TE
        logits_TE = scores_TE / self.score_function.options["temperature"]
        return chosen_TE & is_token_BS.flatten()[:, None], weight_TE, logits_TE

    def _candidates(self, ranking_TE: Tensor) -> Tensor:
        """Return the experts of the best groups: by their largest value, or by the sum of their `best`."""
        assert self.limit is not None
        ranking_TLM = ranking_TE.unflatten(1, (self.limit["num_groups"], -1))
        if self.limit["score"] == "sum" and self.limit["best"] > 1:
            best_TLM = ranking_TLM.topk(self.limit["best"], dim=-1).values
            if self.score_function.bias is None:  # sums of p, in fp64 relative to the token's largest
                best_TLM = self.score_function.log_values(best_TLM).double()
                best_TLM = (best_TLM - best_TLM.amax(dim=(1, 2), keepdim=True).clamp_min(LOWEST)).exp()
            score_TL = best_TLM.sum(dim=-1)
        else:
            score_TL = ranking_TLM.amax(dim=-1)
        kept = score_TL.topk(self.limit["keep"], dim=-1).indices
        allowed_TL = torch.zeros_like(score_TL, dtype=torch.bool).scatter(1, kept, True)
        return allowed_TL[:, :, None].expand_as(ranking_TLM).flatten(1)

    def _weights(
        self, scores_TE: Tensor, probs_TE: Tensor, candidates_TE: Tensor | None, expert_TK: Tensor
    ) -> Tensor:
        kind, prob_TK = self.options["weights"], probs_TE.gather(1, expert_TK)
        if kind == "one":
            prob_TK = torch.ones_like(prob_TK)
        elif kind == "kept_softmax":
            if candidates_TE is not None:
                scores_TE = scores_TE.masked_fill(~candidates_TE, -math.inf)
            prob_TK = scores_TE.gather(1, expert_TK).softmax(dim=-1)
        elif kind == "renormalised":
            kept_TK = None if candidates_TE is None else candidates_TE.gather(1, expert_TK)
            prob_TK = self._shares(prob_TK, scores_TE.gather(1, expert_TK), kept_TK)
        return prob_TK * self.options["scale"]

    def _threshold(self, ranking_TE: Tensor, probs_TE: Tensor) -> Tensor:
        """Return the fewest best experts whose p reach a share of their sum (XMoE)."""
        order_TE = ranking_TE.argsort(dim=-1, descending=True, stable=True)
        sum_TE = probs_TE.gather(1, order_TE).cumsum(dim=-1)
        if self.options["threshold"] == 1:
            return torch.ones_like(probs_TE, dtype=torch.bool)
        count_T1 = (sum_TE < self.options["threshold"] * probs_TE.sum(-1, keepdim=True)).sum(-1, True) + 1
        return self._first(order_TE, count_T1)

    def _shares(self, prob_TK: Tensor, score_TK: Tensor, kept_TK: Tensor | None = None) -> Tensor:
        """Return p over the sum of those that are kept; of small sums by their logarithms."""
        log_TK = self.score_function.log_values(score_TK)
        if kept_TK is not None:
            prob_TK, log_TK = prob_TK.masked_fill(~kept_TK, 0.0), log_TK.masked_fill(~kept_TK, LOWEST)
        total_T1 = prob_TK.sum(dim=-1, keepdim=True)
        return torch.where(total_T1 < SMALL_TOTAL, log_TK.softmax(dim=-1), prob_TK / total_T1)

    def _entropy_aware(
        self, scores_TE: Tensor, ranking_TE: Tensor, probs_TE: Tensor, candidates_TE: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the best m experts, m the perplexity of p within bounds."""
        share_TE = self._shares(probs_TE, scores_TE, candidates_TE)
        perplexity_T1 = torch.special.entr(share_TE).sum(dim=-1, keepdim=True).exp()
        count_T1 = perplexity_T1.round().long().clamp(self.options["min_k"], self.options["max_k"])
        chosen_TE = self._first(ranking_TE.argsort(dim=-1, descending=True, stable=True), count_T1)
        if candidates_TE is not None:
            chosen_TE = chosen_TE & candidates_TE
        if self.options["weights"] == "raw":
            return chosen_TE, probs_TE
        return chosen_TE, self._shares(probs_TE, scores_TE, chosen_TE)

    def _first(self, order_TE: Tensor, count_T1: Tensor) -> Tensor:
        """Return the first experts of an order, bool [T, E]."""
        place_E = torch.arange(order_TE.shape[1], device=order_TE.device)
        return torch.zeros_like(order_TE, dtype=torch.bool).scatter(1, order_TE, place_E < count_T1)
