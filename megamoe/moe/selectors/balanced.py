"""`balanced`: in training, tokens are assigned evenly with the largest total score."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.moe.assignment import balanced_assignment
from megamoe.moe.part import StepContext
from megamoe.moe.process_groups import gather_rows
from megamoe.moe.routing import Pairs, Scored
from megamoe.moe.selectors.choices import WeightedByP
from megamoe.registry import register


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
            expert_T = _assign(scored.scores_TE.detach(), context)
        else:
            expert_T = scored.ranking_TE.argmax(dim=-1)
        expert_T1 = expert_T[:, None]
        return Pairs.of_choices(expert_T1, scored.probs_TE.gather(1, expert_T1))


def _assign(scores_TE: Tensor, context: StepContext) -> Tensor:
    """Return the experts of this rank's tokens, int64 [T]; all ranks of the data group must call it."""
    num_tokens = len(scores_TE)
    index_T = context.token_index(num_tokens, scores_TE.device)
    first = 0
    if context.data_group is not None:
        first = dist.get_rank(context.data_group) * num_tokens
        scores_TE, index_T = (gather_rows(rows, context.data_group) for rows in (scores_TE, index_T))
    order_T = index_T.argsort(stable=True)
    expert_T = torch.empty_like(order_T)
    expert_T[order_T] = balanced_assignment(scores_TE[order_T])
    return expert_T[first : first + num_tokens]
