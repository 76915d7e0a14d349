"""`switch_balance` of scope global_batch on real ranks: their mean is the loss of the whole."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.moe.part import StepContext
from megamoe.parallel import launch
from tests.support.moe.build import make_context, make_part, make_routing
from tests.support.ranks.pool import Pool

RANKS, MICRO_BATCHES, TOKENS, EXPERTS, K = 2, 3, 5, 4, 2


def scores_of(rank: int, micro_batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + micro_batch)
    lean_E = torch.linspace(1, -1, EXPERTS) * (1 + micro_batch)  # micro batches differ, and so do their f
    return torch.randn(TOKENS, EXPERTS, generator=generator, dtype=torch.float64) + lean_E


def values_of_this_rank(running: bool, twice: bool) -> list[tuple[Tensor, Tensor]]:
    """Job: each micro batch's loss and gradient; `twice`: computed again, as in backward."""
    launch.start(launch.find_world(), timeout_minutes=1)
    loss = make_part("loss", "switch_balance", EXPERTS, scope="global_batch", running=running)
    found = []
    for number in range(MICRO_BATCHES):
        place = RANKS * number + dist.get_rank()
        context = make_context(step=1, micro_batch=place, data_group=dist.group.WORLD)
        for _ in range(1 + twice):
            scores_TE = scores_of(dist.get_rank(), number).requires_grad_()
            routing = make_routing(scores_TE.topk(K).indices.tolist(), scores_TE, scores_TE.softmax(-1))
            value = loss(routing, context)
            (gradient_TE,) = torch.autograd.grad(value, scores_TE)
        found.append((value.detach(), gradient_TE))
    return found


def evaluated_by_rank_0() -> float:
    """Job: evaluation on rank 0 alone, which must not wait for the others."""
    launch.start(launch.find_world(), timeout_minutes=1)
    loss = make_part("loss", "switch_balance", EXPERTS, scope="global_batch").eval()
    if dist.get_rank() > 0:
        return 0.0
    scores_TE = scores_of(0, 0)
    routing = make_routing(scores_TE.topk(K).indices.tolist(), scores_TE, scores_TE.softmax(-1))
    return float(loss(routing, StepContext(data_group=dist.group.WORLD)))


def plain_fraction(scores: list[Tensor]) -> Tensor:
    chosen_N = torch.cat([scores_TE.topk(K).indices.flatten() for scores_TE in scores])
    return torch.stack([(chosen_N == expert).double().mean() for expert in range(EXPERTS)])


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_the_mean_over_ranks_is_the_loss_of_the_whole(pool: Pool, running: bool, twice: bool) -> None:
    found = pool.run(values_of_this_rank, running, twice, ranks=RANKS)
    for number in range(MICRO_BATCHES):
        counted = range(number + 1) if running else [number]
        f_E = plain_fraction([scores_of(rank, other) for rank in range(RANKS) for other in counted])
        whole = [scores_of(rank, number).requires_grad_() for rank in range(RANKS)]
        mean_E = torch.cat([scores_TE.softmax(-1) for scores_TE in whole]).mean(0)
        expected = EXPERTS * (f_E * mean_E).sum()
        values: list[Any] = [found[rank][number] for rank in range(RANKS)]
        mean = torch.stack([value for value, _ in values]).mean()
        torch.testing.assert_close(mean, expected, check_dtype=False)
        for (_, gradient_TE), expected_TE in zip(values, torch.autograd.grad(expected, whole), strict=True):
            torch.testing.assert_close(gradient_TE / RANKS, expected_TE)


def test_evaluation_needs_no_other_rank(pool: Pool) -> None:
    scores_TE = scores_of(0, 0)
    expected = EXPERTS * (plain_fraction([scores_TE]) * scores_TE.softmax(-1).mean(0)).sum()
    assert pool.run(evaluated_by_rank_0, ranks=2, timeout_s=20)[0] == pytest.approx(float(expected))
