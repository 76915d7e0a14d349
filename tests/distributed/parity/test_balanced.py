"""balanced over ranks: one problem over the tokens of all, whoever holds which."""

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.moe.part import StepContext
from megamoe.parallel import launch
from tests.support.moe.build import make_context, make_part, make_scored
from tests.support.ranks.pool import Pool

TOKENS, EXPERTS = 24, 4


def experts_of(holders: list[list[int]]) -> list[int]:
    """Job: the experts of this rank's tokens; holders: the tokens' numbers in the data, by rank."""
    world = launch.find_world()
    launch.start(world, timeout_minutes=1)
    mine = torch.tensor(holders[world.rank])
    context = make_context(token_index_T=mine, data_group=dist.group.WORLD)
    return select(mine, context)


def select(token_T: Tensor, context: StepContext) -> list[int]:
    scores_TE = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    scores_TE[:, 0] += 1.0
    scores_TE[6:12] = scores_TE[:6]  # ties
    selector = make_part("selector", "balanced", num_experts=EXPERTS)
    found: list[int] = selector(make_scored(scores_TE[token_T]), context).expert_N.tolist()
    return found


def test_ranks_find_together_what_one_finds_alone(pool: Pool) -> None:
    everyone = torch.arange(TOKENS)
    alone = select(everyone, make_context(token_index_T=everyone))
    assert torch.bincount(torch.tensor(alone)).tolist() == [6] * EXPERTS
    for holders in ([[*range(12)], [*range(12, 24)]], [[*range(1, 24, 2)], [*range(22, -1, -2)]]):
        found = pool.run(experts_of, holders, ranks=2)
        assert found == [[alone[token] for token in mine] for mine in holders]
    half = torch.tensor(holders[0])
    assert select(half, make_context(token_index_T=half)) != found[0]  # a rank by itself finds another
