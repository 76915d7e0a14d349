"""balanced and strictly_balanced over ranks: one problem over the tokens of all, whoever holds which."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.moe.part import StepContext
from megamoe.parallel import launch
from tests.support.moe.build import make_context, make_part, make_scored
from tests.support.ranks.pool import Pool

TOKENS, EXPERTS = 24, 4
Part = tuple[str, dict[str, Any]]  # of a selector: its name and options


def experts_of(part: Part, holders: list[list[int]]) -> list[list[int]]:
    """Job: the experts of this rank's tokens; holders: the tokens' numbers in the data, by rank."""
    world = launch.find_world()
    launch.start(world, timeout_minutes=1)
    mine = torch.tensor(holders[world.rank])
    return select(part, mine, make_context(token_index_T=mine, data_group=dist.group.WORLD))


def select(part: Part, token_T: Tensor, context: StepContext) -> list[list[int]]:
    """The experts of each token."""
    scores_TE = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    scores_TE[:, 0] += 1.0
    scores_TE[6:12] = scores_TE[:6]  # ties
    scored = make_scored(scores_TE[token_T])
    scored.score_function = make_part("score_function", "softmax", EXPERTS)
    name, options = part
    pairs = make_part("selector", name, num_experts=EXPERTS, **options)(scored, context)
    return [pairs.expert_N[pairs.token_N == token].tolist() for token in range(len(token_T))]


@pytest.mark.parametrize(("part", "each"), [(("balanced", {}), 6), (("strictly_balanced", {"k": 2}), 12)])
def test_ranks_find_together_what_one_finds_alone(pool: Pool, part: Part, each: int) -> None:
    """Also where padding leaves them different numbers of tokens."""
    everyone = torch.arange(TOKENS)
    alone = select(part, everyone, make_context(token_index_T=everyone))
    assert torch.bincount(torch.cat([*map(torch.tensor, alone)])).tolist() == [each] * EXPERTS
    interleaved = [[*range(1, 24, 2)], [*range(22, -1, -2)]]
    for holders in ([[*range(7)], [*range(7, 24)]], interleaved):
        found = pool.run(experts_of, part, holders, ranks=2)
        assert found == [[alone[token] for token in mine] for mine in holders]
    half = torch.tensor(interleaved[0])
    assert select(part, half, make_context(token_index_T=half)) != found[0]  # a rank by itself finds another
