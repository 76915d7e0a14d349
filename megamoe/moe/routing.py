"""What one MoE layer decided for its tokens: plain data, whatever the router.

Shape legend of this package
    T  tokens of the micro batch on this rank     E  experts of the layer
    N  (token, expert) pairs                      K  choices of a token
    H  hidden size                                F  expert FFN hidden size

Top-k, a threshold, expert choice and balanced assignment all come down to the same flat list of
pairs, so everyone downstream (dispatch, losses, metrics) serves any number of experts a token.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megamoe.moe.part import ScoreFunction


def count(index_N: Tensor, size: int, weight_N: Tensor | None = None) -> Tensor:
    """int64 [size]: how often each index occurs; weight_N, bool or int64: how much each counts.

    Unlike torch.bincount it never waits for the device.
    """
    weight_N = torch.ones_like(index_N) if weight_N is None else weight_N.to(torch.int64)
    return weight_N.new_zeros(size).scatter_add_(0, index_N, weight_N)


@dataclass
class Pairs:
    """A flat list of (token, expert) pairs, in token order, then by choice.

    token_N, expert_N, choice_N: int64; choice 0 is a token's first choice. weight_N: fp32, the
    factor on the expert's output, carries gradient to the router.
    """

    token_N: Tensor
    expert_N: Tensor
    weight_N: Tensor
    choice_N: Tensor

    @classmethod
    def of_choices(cls, expert_TK: Tensor, weight_TK: Tensor, valid_TK: Tensor | None = None) -> "Pairs":
        """Each token's experts in the order of choice; `valid_TK`, bool: which of them are pairs."""
        num_tokens, num_choices = expert_TK.shape
        token_TK = torch.arange(num_tokens, device=expert_TK.device)[:, None].expand_as(expert_TK)
        choice_TK = torch.arange(num_choices, device=expert_TK.device)[None, :].expand_as(expert_TK)
        columns = (token_TK, expert_TK, weight_TK, choice_TK)
        pairs = cls(*(column_TK.reshape(-1) for column_TK in columns))
        return pairs if valid_TK is None else pairs.keep(valid_TK.reshape(-1))

    def of_tokens(self, first: int, num_tokens: int) -> "Pairs":
        """Those of the tokens from `first` on, which are numbered from 0."""
        own = self.keep((self.token_N >= first) & (self.token_N < first + num_tokens))
        return replace(own, token_N=own.token_N - first)

    def keep(self, keep_N: Tensor) -> "Pairs":
        """The pairs where the bool mask `keep_N` holds."""
        kept_M = keep_N.nonzero().squeeze(1)  # once: each mask of its own would wait for the device
        columns = (self.token_N, self.expert_N, self.weight_N, self.choice_N)
        return Pairs(*(column_N.index_select(0, kept_M) for column_N in columns))


def has_row_per_token(name: str) -> bool:
    """Whether a tensor's name ends in a shape suffix that begins with T."""
    return name.rpartition("_")[2].startswith("T")


@dataclass
class Scored:
    """A micro batch on its way through the router: what the stages so far have found.

    scores_TE: fp32, the scorer's. affinities_TE: fp32, the score function's values over all experts.
    probs_TE: fp32, p, the score function's values of the candidates (the others have exactly 0); until the
    masks are done, the affinities. ranking_TE: fp32 without gradient, what a token's experts are chosen by,
    -inf where one is no candidate. It holds the scores where the score function is monotone and has no bias
    (`ranked_by_scores`). Otherwise it holds p, or the scorer's extras["ranking_TE"] where it gives one, plus
    the score function's bias: under a bias, p in fp32 decides, and experts whose p round alike differ by
    their biases alone. Only its order within a token has the same meaning in both cases. candidates_TE: bool,
    the experts that the masks so far left, None for all. extras: what a scorer hands on, by name; one that
    has a row for each token says so by its shape suffix (clean_TE). open_E: bool, the experts that the masks
    of the whole step left to all tokens (`Mask.step_wide`), None for all. score_function: what the score
    function declares of itself; None: nothing, and every order is that of p.
    """

    scores_TE: Tensor
    affinities_TE: Tensor
    probs_TE: Tensor
    ranking_TE: Tensor
    candidates_TE: Tensor | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)
    open_E: Tensor | None = None
    score_function: "ScoreFunction | None" = field(default=None, repr=False)

    @property
    def monotone_score_function(self) -> "ScoreFunction | None":
        """The score function, if its p grows with the scores of a token."""
        return (
            self.score_function if self.score_function is not None and self.score_function.monotone else None
        )

    @property
    def ranked_by_scores(self) -> bool:
        """Whether ranking_TE holds the scores."""
        score_function = self.monotone_score_function
        return (
            score_function is not None and score_function.bias_E is None and "ranking_TE" not in self.extras
        )

    def within_tokens_TE(self, values_TE: Tensor) -> Tensor:
        """What orders the experts of each token as `values_TE` does, its p, without gradient.

        For a monotone score function the scores, which fp32 tells apart where p rounds to 1 or 0.
        """
        return (values_TE if self.monotone_score_function is None else self.scores_TE).detach()

    def across_tokens_TE(self, values_TE: Tensor) -> Tensor:
        """What orders the pairs of all tokens as `values_TE` does, their p, without gradient.

        The scores where each p depends on its own alone (sigmoid). A softmax's do not compare across tokens.
        """
        score_function = self.monotone_score_function
        return (
            self.scores_TE if score_function is not None and score_function.elementwise else values_TE
        ).detach()

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.scores_TE.shape[0]

    @property
    def num_experts(self) -> int:
        """E."""
        return self.scores_TE.shape[1]


@dataclass
class Routing(Scored):
    """One layer's decision on one micro batch: what the router found, and its pairs.

    wanted: the pairs that the selector chose; pairs: those that the capacity left, which are computed.
    is_local: on all ranks alike, every pair's expert is on its token's own rank.
    """

    wanted: Pairs = field(kw_only=True)
    pairs: Pairs = field(kw_only=True)
    is_local: bool = False

    def wanted_counts_E(self) -> Tensor:
        """Pairs wanted by the selector, per expert, int64."""
        return count(self.wanted.expert_N, self.num_experts)

    def counts_E(self) -> Tensor:
        """Pairs computed, per expert, int64: the load."""
        return count(self.pairs.expert_N, self.num_experts)

    def of_tokens(self, first: int, num_tokens: int) -> "Routing":
        """What concerns the tokens from `first` on, which are numbered from 0."""
        own = slice(first, first + num_tokens)
        pairs = self.pairs.of_tokens(first, num_tokens)
        nothing_dropped = self.wanted is self.pairs
        return replace(
            self,
            scores_TE=self.scores_TE[own],
            affinities_TE=self.affinities_TE[own],
            probs_TE=self.probs_TE[own],
            ranking_TE=self.ranking_TE[own],
            candidates_TE=None if self.candidates_TE is None else self.candidates_TE[own],
            extras={n: value[own] if has_row_per_token(n) else value for n, value in self.extras.items()},
            wanted=pairs if nothing_dropped else self.wanted.of_tokens(first, num_tokens),
            pairs=pairs,
        )
