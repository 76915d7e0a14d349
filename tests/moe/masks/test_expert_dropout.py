"""`expert_dropout`: exact counts, one draw for all, and compositions that it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.moe.part import StepContext
from tests.support.moe.build import make_context, make_hidden, make_layer, make_part, make_scored, moe_config


def masks(steps: int, layer: int = 1, seed: int = 0, **options: Any) -> Tensor:
    """bool [S, E] of 16 experts, after seeing that all tokens have the same row."""
    part = make_part("mask", "expert_dropout", num_experts=16, layer=layer, **options)
    rows = []
    for step in range(steps):
        allowed_TE = part(make_scored(torch.zeros(3, 16)), StepContext(seed=seed, step=step))
        assert allowed_TE.shape == (3, 16) and allowed_TE.dtype == torch.bool
        assert (allowed_TE == allowed_TE[0]).all()
        rows.append(allowed_TE[0])
    return torch.stack(rows)


@pytest.mark.parametrize(("rate", "size", "dropped"), [(0.5, 8, 4), (0.25, 8, 2), (0.75, 4, 3), (0.3, 4, 1)])
def test_every_cluster_loses_exactly_its_share(rate: float, size: int, dropped: int) -> None:
    allowed_SE = masks(50, rate=rate, cluster_size=size)
    assert ((~allowed_SE).view(50, 16 // size, size).sum(-1) == dropped).all()


def test_all_experts_of_a_cluster_are_dropped_alike() -> None:
    dropped_E = (~masks(2000, rate=0.25, cluster_size=8)).float().mean(0)
    assert (dropped_E - 0.25).abs().max() < 0.04  # 4 standard deviations: 4 sqrt(3/16 / 2000)


def test_clusters_are_drawn_apart() -> None:
    first, second = masks(200, cluster_size=8).view(200, 2, 8).unbind(1)
    assert (first == second).all(1).sum() < 20  # 1 in 70 by chance


def test_global_drops_as_many_from_anywhere() -> None:
    allowed_SE = masks(200, level="global", rate=0.75, cluster_size=4)
    assert (allowed_SE.sum(1) == 4).all()
    left_SC = allowed_SE.view(200, 4, 4).sum(-1)
    assert (left_SC == 0).any() and (left_SC > 1).any()


def test_the_draw_depends_on_seed_step_and_layer_alone() -> None:
    first_SE = masks(20)
    assert torch.equal(first_SE, masks(20))
    assert not torch.equal(first_SE[0], first_SE[1])
    assert not torch.equal(first_SE, masks(20, seed=1))
    assert not torch.equal(first_SE, masks(20, layer=2))
    elsewhere = make_context(step=7, token_index_T=torch.arange(100, 105), micro_batch=9)
    part = make_part("mask", "expert_dropout", num_experts=16)
    assert torch.equal(part(make_scored(torch.zeros(5, 16)), elsewhere)[0], first_SE[7])


@pytest.mark.parametrize("level", ["cluster", "global"])
def test_those_closed_are_those_dropped(level: str) -> None:
    part = make_part("mask", "expert_dropout", num_experts=16, layer=3, level=level, rate=0.25)
    for step in range(5):
        context = StepContext(seed=1, step=step)
        closed_E = part.closed_E(context)
        assert closed_E.dtype == torch.bool and closed_E.sum() == 4
        assert torch.equal(~closed_E, part(make_scored(torch.zeros(3, 16)), context)[0])
    assert part.eval().closed_E(context) is None
    others: dict[str, dict[str, Any]] = {
        "expert_dropout": {"rate": 0.0},
        "gating_dropout": {"rate": 1.0, "ranks": 2},
    }
    for name, options in others.items():
        assert make_part("mask", name, num_experts=16, **options).closed_E(context) is None


def test_nothing_is_dropped_in_evaluation_or_at_rate_0() -> None:
    for training, rate in ((False, 0.5), (True, 0.0)):
        part = make_part("mask", "expert_dropout", num_experts=16, rate=rate).train(training)
        assert part(make_scored(torch.zeros(3, 16)), StepContext()) is None


def test_the_score_function_is_computed_over_those_left() -> None:
    router = {"masks": [{"name": "expert_dropout", "cluster_size": 4}]}
    layer = make_layer(moe_config(num_experts=8, router=router))
    routing = layer.router(make_hidden(20), layer.context)
    allowed_E = routing.candidates_TE[0]
    assert allowed_E.view(2, 4).sum(1).tolist() == [2, 2]
    kept_TE = routing.scores_TE[:, allowed_E].exp()
    torch.testing.assert_close(routing.probs_TE[:, allowed_E], kept_TE / kept_TE.sum(1, keepdim=True))
    assert not routing.probs_TE[:, ~allowed_E].any()
    assert allowed_E[routing.pairs.expert_N].all() and len(routing.pairs.expert_N) == 40
