"""The assignment problem of balanced routing: as many tokens for every expert, at the largest total score.

Solved by the auction algorithm (Bertsekas and Castanon 1989, for transportation problems): tokens without
a place bid for their best expert, an expert keeps its highest bids, and its price is the lowest of them. A
bid tops the price by what the token would lose with its second best expert, plus eps; once all have a place
the total is within T * eps of the optimum. Phases from a large eps to a small one (eps scaling), prices
kept, are quicker than the last alone; the prices also bound the optimum from above, which tells when to stop.

Where T does not divide by E, experts have ceil(T / E) slots and E - T mod E blanks, of no score, take the
slots that stay empty, at most one of each expert. Blanks are all alike, so that they bid together: each
for one of the cheapest slots.

Shape suffixes beside those of `routing`: A those of the tokens that matter at the moment.
"""

from typing import Any

import torch
from torch import Tensor

from megamoe.moe.part import StepContext
from megamoe.moe.routing import Pairs, Scored
from megamoe.moe.selectors.choices import WeightedByP, whole_batch
from megamoe.registry import register

START = 0.2  # the first eps and the last, in parts of the scores' range
SHRINK = 0.2
LAST = 1e-9
NONE = -torch.inf


def balanced_assignment(scores_TE: Tensor, tolerance: float = 1e-9) -> Tensor:
    """int64 [T]: each token's expert; every expert has floor(T / E) or ceil(T / E) tokens.

    scores_TE: fp32; NaN counts as 0. The total score comes up to `tolerance`, a share of it, of the optimum,
    or to T * LAST times the range of the scores where that is more. It depends on the scores alone, and as
    good as the optimum itself it is also the same where another layout rounds them otherwise: stopped at 5e-5
    of it, two ranks and one drifted apart within ten steps. On a GPU the scores go to the host, where it is
    solved, and the experts come back.
    """
    if scores_TE.is_cuda:  # each round asks whether all have a place: on the device, hundreds of waits
        return balanced_assignment(scores_TE.detach().cpu(), tolerance).to(scores_TE.device)
    num_tokens, num_experts = scores_TE.shape
    scores_TE = scores_TE.detach().nan_to_num()
    low, high = torch.stack(scores_TE.aminmax()).tolist() if num_tokens else (0.0, 0.0)
    if low == high or num_experts == 1:
        return torch.arange(num_tokens, device=scores_TE.device) % num_experts
    price_E = torch.zeros(num_experts, dtype=torch.float64, device=scores_TE.device)
    eps, last = START * (high - low), LAST * (high - low)
    while True:
        expert_T, price_E = _auction(scores_TE, price_E, eps)
        if eps <= last or _is_close(scores_TE, expert_T, price_E, tolerance):
            return expert_T
        eps = max(eps * SHRINK, last)


def _auction(scores_TE: Tensor, price_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Each token's expert, and the prices, of one phase."""
    num_tokens, num_experts = scores_TE.shape
    slots = -(-num_tokens // num_experts)
    num_blanks = num_experts * slots - num_tokens
    bid_T = torch.full((num_tokens,), NONE, dtype=torch.float64, device=scores_TE.device)
    blank_E = torch.full_like(price_E, NONE)  # the bid of the blank that an expert holds
    expert_T = torch.full((num_tokens,), num_experts, device=scores_TE.device)  # E: none
    free_A, free_blanks = torch.arange(num_tokens, device=scores_TE.device), num_blanks
    while len(free_A) or free_blanks:
        busy_E = torch.zeros(num_experts + 1, dtype=torch.bool, device=scores_TE.device)
        if len(free_A):
            gain_A2, best_A2 = (scores_TE[free_A] - price_E).topk(2, dim=1)
            expert_T[free_A] = best_A2[:, 0]
            bid_T[free_A] = price_E[best_A2[:, 0]] + gain_A2[:, 0] - gain_A2[:, 1] + eps
            busy_E[best_A2[:, 0]] = True
        if free_blanks:
            cost_E = torch.maximum(price_E, blank_E)
            cost, cheapest = cost_E.topk(free_blanks + 1, largest=False)
            blank_E[cheapest[:-1]] = cost[-1] + eps
            busy_E[cheapest[:-1]] = True
        price_E = _settle(expert_T, bid_T, blank_E, price_E, busy_E, slots)
        free_A = (expert_T == num_experts).nonzero()[:, 0]
        if num_blanks:
            free_blanks = num_blanks - int(blank_E.isfinite().sum())
    return expert_T, price_E


def _settle(
    expert_T: Tensor, bid_T: Tensor, blank_E: Tensor, price_E: Tensor, busy_E: Tensor, slots: int
) -> Tensor:
    """Turn out, in place, the lowest bids of experts that have more than slots; the prices from then on.

    busy_E: the experts with new bids; the others stay as they are and are left out of the sort.
    """
    token_A = busy_E[expert_T].nonzero()[:, 0]
    token_A = token_A[bid_T[token_A].argsort(descending=True, stable=True)]
    token_A = token_A[expert_T[token_A].argsort(stable=True)]
    expert_A = expert_T[token_A]
    count_E = torch.bincount(expert_A, minlength=len(price_E))
    start_E = count_E.cumsum(0) - count_E

    def lowest_of_first(n_E: Tensor) -> Tensor:
        """The n-th highest bid of each expert: +inf where n is 0, NONE where there are fewer."""
        bids_A = torch.cat([bid_T[token_A], bid_T.new_tensor([NONE])])
        nth_E = bids_A[(start_E + n_E - 1).clamp(0, len(token_A))].masked_fill(count_E < n_E, NONE)
        return nth_E.masked_fill(n_E == 0, torch.inf)

    blank_E.masked_fill_(lowest_of_first(torch.full_like(count_E, slots)) >= blank_E, NONE)
    has_blank_E = blank_E.isfinite()
    kept_E = slots - has_blank_E.long()
    place_A = torch.arange(len(token_A), device=bid_T.device) - start_E[expert_A]
    expert_T[token_A[place_A >= kept_E[expert_A]]] = len(price_E)
    lowest_E = lowest_of_first(kept_E)
    lowest_E = torch.where(has_blank_E, torch.minimum(lowest_E, blank_E), lowest_E)
    return torch.maximum(price_E, lowest_E)


def _is_close(scores_TE: Tensor, expert_T: Tensor, price_E: Tensor, tolerance: float) -> bool:
    """Whether the total comes up to `tolerance` of the bound that the prices give (weak duality)."""
    num_tokens, num_experts = scores_TE.shape
    least, left = divmod(num_tokens, num_experts)
    total = scores_TE.gather(1, expert_T[:, None]).double().sum()
    slots = price_E.sum() * least + price_E.topk(left).values.sum()
    bound = (scores_TE - price_E).amax(dim=1).sum() + slots
    return bool(bound - total <= tolerance * bound.abs())


@register("selector", "balanced")
class Balanced(WeightedByP):
    """In training a linear assignment: every expert gets T / E tokens, and the sum of their scores is
    maximal.

    T counts the tokens of all data-parallel ranks' micro batches. Every rank gathers their scores, sorts them
    by the order of the data and solves the same problem, so the result does not depend on how tokens are
    distributed. If E does not divide T, an expert gets floor(T / E) or ceil(T / E) tokens. Evaluation sends
    each token to its best expert. The weight is p, which is sigmoid(s), since `requires` asks for an
    elementwise score function. In training the choice depends on all tokens of the batch, including later
    ones.

    Source: Lewis et al. 2021, BASE Layers.

    The solution is exact up to a tolerance (see `assignment`). BASE's code stops its auction after 100
    iterations and takes the result so far. BASE first shuffles tokens between ranks and solves a smaller
    problem on each; here there is one problem for all tokens.
    """

    experts_alike = True

    @classmethod
    def provides(cls, options: Any) -> set[str]:
        return {"assigned", "fixed_count", "over_all_ranks", "even_load", "even_first_choices"}

    @classmethod
    def requires(cls, options: Any) -> dict[str, str]:
        return {
            "elementwise": "since a token is often sent to an expert that is not its best",
            "dropless": "since the loads are even already",
        }

    @classmethod
    def refuses(cls, options: Any) -> dict[str, str]:
        return {
            "mask": "but every token must be free to go to every expert for the loads to be even",
            "bias": "but the loads are even already",
        }

    def forward(self, scored: Scored, context: StepContext) -> Pairs:
        """Return T pairs."""
        if self.training:
            scores_XE, own_T = whole_batch(scored.scores_TE.detach(), context)
            expert_T = balanced_assignment(scores_XE)[own_T]
        else:
            expert_T = scored.ranking_TE.argmax(dim=-1)
        expert_T1 = expert_T[:, None]
        return Pairs.of_choices(expert_T1, scored.probs_TE.gather(1, expert_T1))
