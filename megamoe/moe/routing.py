"""The result of one MoE layer's router for a micro batch, as plain data.

Shape suffixes of this package
    T  tokens of the micro batch on this rank     E  experts of the layer
    N  (token, expert) pairs                      K  choices of a token
    H  hidden size                                F  expert FFN hidden size

Top-k, a threshold, expert choice and balanced assignment all give the same flat list of pairs. So dispatch,
losses and metrics work with any number of experts per token.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megamoe.kernels.choice import Kernels
from megamoe.kernels.router import masked

if TYPE_CHECKING:
    from megamoe.moe.part import ScoreFunction


LOWEST = torch.finfo(torch.float32).min  # a logarithm that is finite, and counts for nothing


def count(index_N: Tensor, size: int, weight_N: Tensor | None = None) -> Tensor:
    """Return how often each index occurs, int64 [size]; weight_N (bool or int64): how much each counts.

    Unlike torch.bincount it never waits for the device.
    """
    weight_N = torch.ones_like(index_N) if weight_N is None else weight_N.to(torch.int64)
    return weight_N.new_zeros(size).scatter_add_(0, index_N, weight_N)


@lru_cache(maxsize=2)  # with padded sequences the number of tokens differs in each micro batch
def tokens_and_choices(num_tokens: int, num_choices: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token_N and choice_N of pairs in which every token has all its choices; shared by all layers."""
    token_T, choice_K = torch.arange(num_tokens, device=device), torch.arange(num_choices, device=device)
    return token_T.repeat_interleave(num_choices), choice_K.repeat(num_tokens)


@dataclass
class Pairs:
    """A flat list of (token, expert) pairs, sorted by token, then by choice.

    token_N, expert_N, choice_N: int64; choice 0 is a token's first choice. weight_N: fp32, the factor on the
    expert's output, which carries the gradient to the router. None of them is written to: layers may share
    them. each: the number of pairs of every token, where all have as many; None where that is not known.
    rows: the number of tokens that `of_choices` was given, otherwise None. log_N: log p up to a constant of
    the token, where `after_drops` needs it.
    """

    token_N: Tensor
    expert_N: Tensor
    weight_N: Tensor
    choice_N: Tensor
    each: int | None = None
    rows: int | None = None
    log_N: Tensor | None = None

    @classmethod
    def of_choices(cls, expert_TK: Tensor, weight_TK: Tensor, valid_TK: Tensor | None = None) -> "Pairs":
        """Build the pairs from each token's experts in order of choice; `valid_TK`, bool: which of them are
        pairs.

        Raises:
            ValueError: unless all have the same shape [T, K].
        """
        if expert_TK.dim() != 2:
            raise ValueError(
                f"Pairs.of_choices: expert_TK is {[*expert_TK.shape]}, expected [tokens, choices]"
            )
        for name, other_TK in (("weight_TK", weight_TK), ("valid_TK", valid_TK)):
            if other_TK is not None and other_TK.shape != expert_TK.shape:
                found, expected = [*other_TK.shape], [*expert_TK.shape]
                raise ValueError(f"Pairs.of_choices: {name} is {found}, expected {expected} as of expert_TK")
        token_N, choice_N = tokens_and_choices(*expert_TK.shape, expert_TK.device)
        columns = (token_N, expert_TK.reshape(-1), weight_TK.reshape(-1), choice_N)
        pairs = cls(*columns, each=expert_TK.shape[1], rows=len(expert_TK))
        return pairs if valid_TK is None else replace(pairs.keep(valid_TK.reshape(-1)), rows=len(expert_TK))

    def of_tokens(self, first: int, num_tokens: int) -> "Pairs":
        """Return the pairs of `num_tokens` tokens from `first` on, with the tokens renumbered from 0.

        The host waits for the device, unless `each` is known.
        """
        if self.each is None:
            own = self.keep((self.token_N >= first) & (self.token_N < first + num_tokens))
        else:
            rows = slice(first * self.each, (first + num_tokens) * self.each)
            own = Pairs(
                self.token_N[rows], self.expert_N[rows], self.weight_N[rows], self.choice_N[rows], self.each
            )
        return replace(own, token_N=own.token_N - first)

    def keep(self, keep_N: Tensor) -> "Pairs":
        """Return the pairs for which the bool mask `keep_N` is true."""
        kept_M = keep_N.nonzero().squeeze(1)  # once: indexing by a mask waits for the device
        token_M, expert_M, weight_M, choice_M = (
            column_N.index_select(0, kept_M)
            for column_N in (self.token_N, self.expert_N, self.weight_N, self.choice_N)
        )
        log_M = None if self.log_N is None else self.log_N.index_select(0, kept_M)
        return Pairs(token_M, expert_M, weight_M, choice_M, log_N=log_M)


@dataclass
class CapacitySlots:
    """A capacity's result in fixed shares: every expert gets `size` rows, however many pairs it has.

    place_N: int64, each pair's place among those of its expert; from `size` on it has none.
    """

    place_N: Tensor
    size: int

    def kept_N(self) -> Tensor:
        """Return which pairs have a place, bool."""
        return self.place_N < self.size

    def filled(self, pairs: Pairs, num_tokens: int, num_experts: int) -> Pairs:
        """Return a row for each place, sorted by expert; where there is no pair, of the token `num_tokens`
        with weight 0. It never waits for the device.
        """
        rows, missing = num_experts * self.size, len(pairs.token_N)
        row_N = torch.where(self.kept_N(), pairs.expert_N * self.size + self.place_N, rows)
        pair_R = row_N.new_full((rows + 1,), missing)
        pair_R.scatter_(0, row_N, torch.arange(missing, device=row_N.device))  # dropped pairs to the last
        pair_R = pair_R[:rows]

        def of_rows(values_N: Tensor, empty: int) -> Tensor:
            return torch.cat((values_N, values_N.new_full((1,), empty))).index_select(0, pair_R)

        expert_R = torch.arange(num_experts, device=row_N.device).repeat_interleave(self.size)
        token_R, choice_R = of_rows(pairs.token_N, num_tokens), of_rows(pairs.choice_N, 0)
        return Pairs(token_R, expert_R, of_rows(pairs.weight_N, 0), choice_R)


Places = CapacitySlots  # the name that earlier plugins import


def has_row_per_token(name: str) -> bool:
    """Whether a tensor's name ends in a shape suffix that begins with T."""
    return name.rpartition("_")[2].startswith("T")


@dataclass
class Scored:
    """A micro batch inside the router: the results of the stages so far.

    scores_TE: fp32, from the scorer. affinities_TE: fp32, the score function's values over all experts.
    probs_TE: fp32, p, the score function's values of the candidates, exactly 0 for the others; until the
    masks are done, the affinities. ranking_TE: fp32 without gradient, what a token's experts are chosen by,
    -inf for experts that are no candidates. candidates_TE: bool, the experts that the masks have left so far;
    None for all. extras: further tensors of the scorer by name; one with a row for each token has a shape
    suffix that begins with T (clean_TE). open_E: bool, the experts that the step-wide masks left; None for
    all. score_function: the score function, for what it declares; None: every order is that of p.
    least_candidates: every token has so many candidates, which the host knows without a look at the masks.

    ranking_TE holds the scores if the score function is monotone and has no bias (`ranked_by_scores`).
    Otherwise it holds p, or the scorer's extras["ranking_TE"], plus the score function's bias. With a bias,
    experts whose p are equal in fp32 differ by their biases alone. Only the order within a token has the same
    meaning in both cases.
    """

    scores_TE: Tensor
    affinities_TE: Tensor
    probs_TE: Tensor
    ranking_TE: Tensor
    candidates_TE: Tensor | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)
    open_E: Tensor | None = None
    score_function: "ScoreFunction | None" = field(default=None, repr=False)
    least_candidates: int = 0

    def candidates_among_TK(self, best_TK: Tensor) -> Tensor | None:
        """Return which of each token's best experts by `ranking_TE` are candidates, bool; None: all are."""
        if self.candidates_TE is None or best_TK.shape[1] <= self.least_candidates:
            return None
        return self.candidates_TE.gather(1, best_TK)

    @property
    def monotone_score_function(self) -> "ScoreFunction | None":
        """The score function if it is monotone, otherwise None."""
        found = self.score_function
        return found if found is not None and found.monotone else None

    def small_slope(self, best: bool = False) -> float | None:
        """Return the score function's `small_slope`; None if no sum of a token's chosen p can be small.

        best: the chosen are the best by `ranking_TE`, whose sum is at least 1/E where all p sum to 1.
        """
        found = self.monotone_score_function
        if found is None or (best and self.ranked_by_scores and "sums_to_1" in found.provides(found.config)):
            return None
        return found.small_slope

    @property
    def ranked_by_scores(self) -> bool:
        """Whether ranking_TE holds the scores."""
        found = self.monotone_score_function
        return found is not None and found.bias_E is None and "ranking_TE" not in self.extras

    def within_tokens_TE(self, values_TE: Tensor) -> Tensor:
        """Return values that order each token's experts as `values_TE` (its p) does, without gradient.

        For a monotone score function these are the scores, which differ even if fp32 rounds p to 1 or 0.
        """
        return (values_TE if self.monotone_score_function is None else self.scores_TE).detach()

    def across_tokens_TE(self, values_TE: Tensor) -> Tensor:
        """Return values that order the pairs of all tokens as `values_TE` (their p) does, without gradient.

        These are the scores if each p depends on its own score alone (sigmoid). The scores of a softmax do
        not compare across tokens. Its p are computed again with a sum in fp64, so that p that are equal by
        mathematics are equal here: a sum in fp32 depends on the order of a token's scores, in its last bits
        and differently in each kernel.
        """
        found = self.monotone_score_function
        if found is None:
            return values_TE.detach()
        if found.elementwise:
            return self.scores_TE.detach()
        log_TE = found.log_values(self.scores_TE.detach()).double()
        among_TE = self.candidates_TE
        if among_TE is not None and not found.over_all and values_TE is not self.affinities_TE:
            log_TE = log_TE.masked_fill(~among_TE, float("-inf"))
        probs_TE = log_TE.softmax(dim=-1).float()
        return probs_TE if among_TE is None else probs_TE.masked_fill(values_TE.detach() == 0, 0.0)

    def of_candidates_TE(self, values_TE: Tensor, other: float, kernels: Kernels) -> Tensor:
        """Return the values [T, E] with `other` for the experts that are no candidates."""
        return masked(values_TE, self.candidates_TE, other, kernels)

    @property
    def num_tokens(self) -> int:
        """The number of tokens T."""
        return self.scores_TE.shape[0]

    @property
    def num_experts(self) -> int:
        """The number of experts E."""
        return self.scores_TE.shape[1]


@dataclass
class Routing(Scored):
    """The router's result for one micro batch: its intermediate tensors and its pairs.

    wanted: the pairs that the selector chose. pairs: those that the capacity kept; they are computed.
    is_local: on all ranks, every pair's expert is on its token's own rank. slots: in fixed shares, the rows
    of each expert; `pairs` are then those of `CapacitySlots.filled`.
    """

    wanted: Pairs = field(kw_only=True)
    pairs: Pairs = field(kw_only=True)
    is_local: bool = False
    slots: int | None = None
    _counts: list[tuple[Pairs, Tensor]] = field(default_factory=list, init=False, repr=False, compare=False)

    def wanted_counts_E(self) -> Tensor:
        """Return the number of pairs that the selector chose for each expert, int64; not to be written."""
        return self._counts_of(self.wanted)

    def counts_E(self) -> Tensor:
        """Return the load: the number of computed pairs of each expert, int64; not to be written."""
        return self._counts_of(self.pairs)

    def remember_counts(self, counts_E: Tensor) -> None:
        """Take the load from the sort for the dispatch, which has counted it: int64 [E]."""
        if not any(counted is self.pairs for counted, _ in self._counts):
            self._counts.append((self.pairs, counts_E))

    def _counts_of(self, pairs: Pairs) -> Tensor:
        """Count once, though the dispatch, the losses and the metrics all ask."""
        known = next((counts_E for counted, counts_E in self._counts if counted is pairs), None)
        if known is None:
            has_empty = self.slots is not None and pairs is self.pairs
            filled_N = pairs.token_N < self.num_tokens if has_empty else None
            known = count(pairs.expert_N, self.num_experts, filled_N)
            self._counts.append((pairs, known))
        return known

    def width_D(self) -> Tensor:
        """Return the number of tokens with d pairs, at place d, int64 [E + 1]; above E as E."""
        width_T = count(self.pairs.token_N, self.num_tokens + 1)[: self.num_tokens]
        return count(width_T.clamp(max=self.num_experts), self.num_experts + 1)

    def keep(self, keep_N: Tensor) -> "Routing":
        """Return the routing with those of its pairs for which the mask is true."""
        pairs = (
            self.pairs.keep(keep_N)
            if self.slots is None
            else self._emptied(self.pairs.token_N, ~keep_N, self.num_tokens)
        )
        return replace(self, pairs=pairs)

    def _emptied(self, token_N: Tensor, empty_N: Tensor, num_tokens: int) -> Pairs:
        """Return the fixed shares of these tokens; empty ones are of the token after the last."""
        weight_N = self.pairs.weight_N.masked_fill(empty_N, 0.0)
        return replace(self.pairs, token_N=token_N.masked_fill(empty_N, num_tokens), weight_N=weight_N)

    def _pairs_of_tokens(self, first: int, num_tokens: int) -> Pairs:
        if self.slots is None:
            return self.pairs.of_tokens(first, num_tokens)
        token_N = self.pairs.token_N - first
        return self._emptied(token_N, (token_N < 0) | (token_N >= num_tokens), num_tokens)

    def _tables(self, place: Any) -> dict[str, Any]:
        """Return the tables [T, E] of some tokens or experts."""
        names = ("scores_TE", "affinities_TE", "probs_TE", "ranking_TE", "candidates_TE")
        return {name: None if (of := getattr(self, name)) is None else of[place] for name in names}

    def of_first_experts(self, count: int) -> "Routing":
        """Return the routing with the first experts alone, which compute, and with their pairs.

        The host waits for the device, as for pairs that a capacity drops.
        """

        def first(pairs: Pairs) -> Pairs:
            return pairs.keep(pairs.expert_N < count)

        pairs = first(self.pairs)
        return replace(
            self,
            **self._tables((slice(None), slice(count))),
            open_E=None if self.open_E is None else self.open_E[:count],
            wanted=pairs if self.wanted is self.pairs else first(self.wanted),
            pairs=pairs,
        )

    def of_tokens(self, first: int, num_tokens: int) -> "Routing":
        """Return the routing of `num_tokens` tokens from `first` on, renumbered from 0."""
        own = slice(first, first + num_tokens)
        extras = {n: value[own] if has_row_per_token(n) else value for n, value in self.extras.items()}
        pairs = self._pairs_of_tokens(first, num_tokens)
        wanted = pairs if self.wanted is self.pairs else self.wanted.of_tokens(first, num_tokens)
        return replace(self, **self._tables(own), extras=extras, wanted=wanted, pairs=pairs)
