"""`gating_dropout`: which steps, which experts, and when nothing need be sent."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.moe.part import Mask, StepContext
from tests.support.moe.build import make_context, make_hidden, make_layer, make_part, make_scored, moe_config


def make(expert_parallel: int = 1, layer: int = 1, **options: Any) -> Mask:
    return make_part("mask", "gating_dropout", 8, layer, dims={"expert_parallel": expert_parallel}, **options)


def mask(part: Mask, context: StepContext) -> Tensor:
    """bool [E], after seeing that all tokens have the same; all are allowed where nothing is dropped."""
    allowed_TE = part(make_scored(torch.zeros(3, 8)), context)
    if allowed_TE is None:
        return torch.ones(8, dtype=torch.bool)
    assert allowed_TE.shape == (3, 8) and (allowed_TE == allowed_TE[0]).all() and not allowed_TE.all()
    return allowed_TE[0]


def dropped_steps(part: Mask, steps: int, seed: int = 0, micro_batch: int = 0) -> list[bool]:
    contexts = [make_context(seed=seed, step=step, micro_batch=micro_batch) for step in range(steps)]
    return [not bool(mask(part, context).all()) for context in contexts]


@pytest.mark.parametrize("micro_batch", range(6))
def test_a_tokens_rank_follows_the_number_of_its_micro_batch(micro_batch: int) -> None:
    home = micro_batch % 4
    allowed_E = mask(make(rate=1.0, ranks=4), make_context(micro_batch=micro_batch))
    assert allowed_E.nonzero().flatten().tolist() == [2 * home, 2 * home + 1]


def test_ranks_are_those_of_the_run_by_default() -> None:
    context = make_context(micro_batch=1)
    assert torch.equal(mask(make(2, rate=1.0), context), mask(make(rate=1.0, ranks=2), context))
    assert mask(make(2, rate=1.0), context).tolist() == [False] * 4 + [True] * 4


def test_the_share_of_dropped_steps() -> None:
    share = sum(dropped_steps(make(rate=0.3, ranks=2), 2000)) / 2000
    assert abs(share - 0.3) < 0.04  # 4 standard deviations: 4 sqrt(0.21 / 2000)


def test_one_draw_a_step_for_all_layers_and_micro_batches() -> None:
    first = dropped_steps(make(ranks=2), 60)
    assert first == dropped_steps(make(ranks=2, layer=5), 60)
    assert first == dropped_steps(make(ranks=2), 60, micro_batch=3)
    assert first == dropped_steps(make(expert_parallel=2), 60) == dropped_steps(make(4, ranks=2), 60)
    assert first != dropped_steps(make(ranks=2), 60, seed=1)


def test_never_in_evaluation() -> None:
    part = make(2, rate=1.0).eval()
    assert not any(dropped_steps(part, 5))
    assert not part.keeps_tokens_local(StepContext())


def test_tokens_stay_local_in_dropped_steps_of_the_real_ranks() -> None:
    for part in (make(2), make(2, ranks=2), make(ranks=2), make(4, ranks=2)):
        homes = [part.keeps_tokens_local(StepContext(step=step)) for step in range(30)]
        real = part.dims.expert_parallel == 2
        assert homes == (dropped_steps(part, 30) if real else [False] * 30)
        assert any(dropped_steps(part, 30))


def test_a_step_that_is_not_dropped_has_no_mask() -> None:
    router = {"masks": [{"name": "gating_dropout", "rate": 1.0, "ranks": 2}]}
    layer = make_layer(moe_config(num_experts=8, router=router))
    assert layer.router(make_hidden(4), layer.context).candidates_TE is not None
    routing = layer.eval().router(make_hidden(4), layer.context)
    assert routing.candidates_TE is None and routing.probs_TE is routing.affinities_TE


def test_the_score_function_chooses_among_the_ranks_own_experts() -> None:
    router = {"masks": [{"name": "gating_dropout", "rate": 1.0, "ranks": 2}], "selector": {"k": 3}}
    layer = make_layer(moe_config(num_experts=8, router=router), make_context(micro_batch=3))
    routing = layer.router(make_hidden(10), layer.context)
    best_TK = routing.scores_TE[:, 4:].topk(3).indices + 4
    assert routing.pairs.expert_N.tolist() == best_TK.flatten().tolist()
    torch.testing.assert_close(routing.probs_TE[:, 4:], routing.scores_TE[:, 4:].softmax(1))
    assert not routing.is_local


def test_a_limit_after_it_chooses_among_the_ranks_own_groups() -> None:
    home = {"name": "gating_dropout", "rate": 1.0, "ranks": 2}
    limit = {"name": "group_limit", "num_groups": 4, "keep": 1}
    router = {"masks": [home, limit], "selector": {"k": 2}}
    layer = make_layer(moe_config(num_experts=8, router=router))
    pairs = layer.router(make_hidden(30), layer.context).pairs
    assert (pairs.expert_N < 4).all() and len(pairs.expert_N) == 60
    assert (pairs.expert_N.view(30, 2) // 2).diff(dim=1).eq(0).all()
