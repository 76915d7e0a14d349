"""`balanced`: in training, the tokens are shared out evenly at the largest total score."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.moe.assignment import balanced_assignment
from megamoe.moe.part import Selector, StepContext
from megamoe.moe.routing import Pairs, Scored
from megamoe.registry import register


@register("selector", "balanced")
class Balanced(Selector):
    """In training a linear assignment: every expert gets T / E tokens, the sum of their scores is maximal.

    T are here the tokens of all data-parallel ranks' micro batches together, whose scores every rank
    gathers, puts in the order of the data and solves alike, so that how they were dealt out does not
    matter. Where E does not divide T an expert gets floor(T / E) or ceil(T / E). Evaluation is greedy: each
    token's best expert. The weight is p, sigmoid(s) with the score function that `check` asks for. Source:
    Lewis et al. 2021, BASE Layers.

    The solution is exact to a tolerance (see `assignment`); BASE's code stops after 100 iterations of its
    auction and then takes what comes. BASE first shuffles tokens between ranks, to solve a smaller problem on
    each; here there is one, of them all. In training the choice looks at all tokens of the
    batch, later ones too.
    """

    @dataclass
    class Config:
        """No options."""

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        """An even load, of first choices too."""
        return {"assigned", "over_all_ranks", "even_load", "even_first_choices"}

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        """BASE's sigmoid, and no second balance."""
        return {
            "elementwise": "since a token is often sent to an expert that is not its best",
            "dropless": "since the loads are even already",
        }

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        """What would undo the balance, or be a second one."""
        return {
            "mask": "but every token must be free to go to every expert for the loads to be even",
            "bias": "but the loads are even already",
        }

    def forward(self, scored: Scored, context: StepContext) -> Pairs:
        """T pairs."""
        if self.training:
            expert_T = _assign(scored.scores_TE.detach(), context)
        else:
            expert_T = scored.ranking_TE.argmax(dim=-1)
        expert_T1 = expert_T[:, None]
        return Pairs.of_choices(expert_T1, scored.probs_TE.gather(1, expert_T1))


def _assign(scores_TE: Tensor, context: StepContext) -> Tensor:
    """int64 [T]: the experts of this rank's tokens; all ranks of the data group must call it."""
    num_tokens = len(scores_TE)
    index_T = context.token_index(num_tokens, scores_TE.device)
    first = 0
    if context.data_group is not None:
        first = dist.get_rank(context.data_group) * num_tokens
        scores_TE, index_T = _gather(scores_TE, context.data_group), _gather(index_T, context.data_group)
    order_T = index_T.argsort(stable=True)
    expert_T = torch.empty_like(order_T)
    expert_T[order_T] = balanced_assignment(scores_TE[order_T])
    return expert_T[first : first + num_tokens]


def _gather(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, in the order of their numbers; every rank has as many."""
    together = rows.new_empty(dist.get_world_size(group) * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(together, rows.contiguous(), group=group)
    return together
