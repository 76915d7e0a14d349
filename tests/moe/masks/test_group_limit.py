"""`group_limit`: group scores by hand, and a loop over tokens and groups."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.moe.part import StepContext
from megamoe.moe.validation import check_parts
from tests.support.moe.build import (
    make_hidden,
    make_layer,
    make_part,
    make_router,
    make_scored,
    moe_config,
    route_scores,
)

# Four groups of two: the largest are 0.3, 0.2, 0.12, 0.05; the sums 0.31, 0.39, 0.23, 0.07.
PROBS = torch.tensor([[0.30, 0.01, 0.20, 0.19, 0.12, 0.11, 0.05, 0.02]])


def limit(probs_TE: Tensor, candidates_TE: Tensor | None = None, k: int = 1, **options: Any) -> Tensor:
    part = make_part("mask", "group_limit", probs_TE.shape[1], dims={"num_choices": k}, **options)
    return part(make_scored(probs_TE, probs_TE, candidates_TE), StepContext())


def groups_of(allowed_TE: Tensor, num_groups: int) -> list[list[int]]:
    """The groups allowed for each token, after seeing that none is cut."""
    allowed_TGL = allowed_TE.view(len(allowed_TE), num_groups, -1)
    assert (allowed_TGL.all(-1) == allowed_TGL.any(-1)).all()
    return [row.nonzero().flatten().tolist() for row in allowed_TGL.any(-1)]


@pytest.mark.parametrize(
    ("options", "k", "expected"),
    [
        ({"keep": 1}, 2, [0]),  # 0.30
        ({"keep": 1, "score": "sum"}, 2, [1]),  # k / keep = 2: 0.39 against 0.31
        ({"keep": 2, "score": "sum"}, 2, [0, 1]),  # k / keep = 1, as max
        ({"keep": 1, "score": "sum"}, 1, [0]),  # of one choice, one
        ({"keep": 2, "score": "sum", "best": 2}, 2, [0, 1]),
        ({"keep": 3, "score": "max"}, 6, [0, 1, 2]),
    ],
)
def test_by_hand(options: dict[str, Any], k: int, expected: list[int]) -> None:
    assert groups_of(limit(PROBS, k=k, num_groups=4, **options), 4) == [expected]


@pytest.mark.parametrize("score", ["max", "sum"])
def test_it_equals_a_loop(score: str) -> None:
    probs_TE = torch.rand(40, 24, generator=torch.Generator().manual_seed(3))
    options: dict[str, Any] = {"score": score, **({"best": 3} if score == "sum" else {})}
    found = groups_of(limit(probs_TE, num_groups=6, keep=2, **options), 6)
    for row, groups in zip(probs_TE.tolist(), found, strict=True):
        members = [sorted(row[4 * g : 4 * g + 4]) for g in range(6)]
        scores = [member[-1] if score == "max" else sum(member[-3:]) for member in members]
        assert groups == sorted(sorted(range(6), key=lambda g: -scores[g])[:2])


def test_what_an_earlier_mask_took_away_adds_nothing() -> None:
    probs_TE = torch.tensor([[0.3, 0.3, 0.2, 0.1, 0.05, 0.05]])
    candidates_TE = torch.tensor([[False, False, True, False, True, True]])
    for options in ({"score": "max"}, {"score": "sum", "best": 2}):
        allowed_TE = limit(probs_TE, candidates_TE, num_groups=3, keep=2, **options)
        assert groups_of(allowed_TE, 3) == [[1, 2]]  # 0.2 of one expert counts; the empty group is last
        assert groups_of(limit(probs_TE, candidates_TE, num_groups=3, keep=1, **options), 3) == [[1]]


@pytest.mark.parametrize("options", [{"score": "max"}, {"score": "sum", "best": 2}])
def test_a_group_without_candidates_is_last_even_after_negative_ones(options: dict[str, Any]) -> None:
    scored = make_scored(torch.zeros(1, 6))
    scored.ranking_TE = torch.tensor([[-torch.inf, -torch.inf, -0.5, -0.2, -0.1, -torch.inf]])  # under a bias
    scored.candidates_TE = scored.ranking_TE.isfinite()
    part = make_part("mask", "group_limit", 6, num_groups=3, keep=2, **options)
    assert groups_of(part(scored, StepContext()), 3) == [[1, 2]]


def test_an_absent_expert_never_beats_one_with_a_negative_value() -> None:
    """Under a bias: -0.3 and an absent one against -0.2 and -0.4; without it the second group is better."""
    scored = make_scored(torch.zeros(2, 6))
    scored.ranking_TE = torch.tensor([[-0.3, -torch.inf, -0.2, -0.4, -9.0, -9.0], [-torch.inf] * 6])
    scored.candidates_TE = scored.ranking_TE.isfinite()
    part = make_part("mask", "group_limit", 6, num_groups=3, keep=1, score="sum", best=2)
    assert groups_of(part(scored, StepContext())[:1], 3) == [[1]]  # 8.8 + 8.6 against 8.7 + 0
    scored.ranking_TE = scored.ranking_TE + 20.0
    assert groups_of(part(scored, StepContext())[:1], 3) == [[1]]  # what all have in common changes nothing


def test_the_bias_of_the_score_function_counts() -> None:
    router: dict[str, Any] = {
        "masks": [{"name": "group_limit", "num_groups": 4, "keep": 1}],
        "score_function": {"name": "sigmoid", "bias_update": 0.1},
    }
    layer = make_layer(moe_config(num_experts=8, router=router))
    assert layer.router(make_hidden(30), layer.context).candidates_TE[:, :6].any()
    assert layer.router.score_function.bias_E is not None
    layer.router.score_function.bias_E[6] = 5.0
    routing = layer.router(make_hidden(30), layer.context)
    assert groups_of(routing.candidates_TE, 4) == [[3]] * 30
    assert (routing.pairs.expert_N >= 6).all() and len(routing.pairs.expert_N) == 60


@pytest.mark.parametrize("options", [{"score": "max"}, {"score": "sum", "best": 2}], ids=str)
@pytest.mark.parametrize(
    ("score_function", "scores", "groups"),
    [
        ("sigmoid", [17.0, 18.0, 19.0, 19.0, 20.0, 20.0, 17.0, 17.0], [1, 2]),  # all round to 1
        ("sigmoid", [-120.0, -121.0, -119.0, -119.0, -110.0, -110.0, -130.0, -130.0], [1, 2]),  # all to 0
        ("softmax", [1.0, 2.0, 20.0, 3.0, 19.0, 9.0, 150.0, 0.0], [1, 3]),  # all but the first to 0
    ],
)
def test_groups_with_equal_rounded_p_are_ordered_by_their_scores(
    score_function: str, scores: list[float], groups: list[int], options: dict[str, Any]
) -> None:
    router = make_router(
        8,
        score_function=score_function,
        masks=[{"name": "group_limit", "num_groups": 4, "keep": 2, **options}],
    )
    candidates_TE = route_scores(router, torch.tensor([scores])).candidates_TE
    assert candidates_TE is not None and groups_of(candidates_TE, 4) == [groups]


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize(
    "score_function", [{"name": "softmax", "temperature": 0.7}, {"name": "sigmoid"}], ids=str
)
def test_a_sum_is_one_of_p_and_not_of_scores(score_function: dict[str, Any], dropped: bool) -> None:
    """Compare a router with a loop over p in fp64; an absent expert counts as the token's least."""
    dropout = [{"name": "expert_dropout", "cluster_size": 12, "rate": 0.25}] if dropped else []
    limit = {"name": "group_limit", "num_groups": 6, "keep": 2, "score": "sum", "best": 3}
    router = make_router(24, score_function=score_function, masks=[*dropout, limit])
    scores_TE = 3 * torch.randn(60, 24, generator=torch.Generator().manual_seed(7))
    routing = route_scores(router, scores_TE)
    open_E = torch.ones(24, dtype=torch.bool) if routing.open_E is None else routing.open_E
    probs_TE = router.score_function(scores_TE.double(), None)
    by_score = 0
    for row, scores_E, kept_E in zip(probs_TE, scores_TE, routing.candidates_TE, strict=True):  # type: ignore[arg-type]
        above_E = (row - row[open_E].min() * dropped).masked_fill(~open_E, 0.0)
        sums = above_E.view(6, 4).topk(3).values.sum(1)
        expected = sums.topk(2).indices.sort().values
        assert (kept_E & open_E).view(6, 4).any(1).nonzero().flatten().tolist() == expected.tolist()
        by_score += (
            scores_E.view(6, 4).topk(3).values.sum(1).topk(2).indices.sort().values.tolist()
            != expected.tolist()
        )
    assert by_score > 5  # sums of scores would keep other groups


def test_the_default_of_best_is_at_most_a_group() -> None:
    """`above` counts with its `mean`: 8 / 1 experts of a group of 4."""
    above = {"name": "above", "value": 0.01, "at_least": 1, "mean": 8}
    limit = {"name": "group_limit", "num_groups": 8, "keep": 1, "score": "sum"}
    config = moe_config(num_experts=32, router={"masks": [limit], "selector": above})
    check_parts(config, 1)
    routing = make_layer(config).router(make_hidden(8), StepContext())
    assert routing.candidates_TE.sum(1).tolist() == [4] * 8
