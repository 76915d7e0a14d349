"""The balance loss on cosines: hand-worked numbers, a plain fp64 formula, the constant temperature."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.moe.build import (
    assert_alike,
    gradient_of,
    loss_of,
    make_hidden,
    make_layer,
    make_pairs,
    make_scored,
    moe_config,
    observed,
    routed,
)


def value(
    experts: list[list[int]],
    cosine_TE: Tensor,
    candidates_TE: Tensor | None = None,
    score_function: frozenset[str] = frozenset(),
    **options: Any,
) -> Tensor:
    scored = make_scored(cosine_TE / 0.01, None, candidates_TE, cosine_TE=cosine_TE)  # another temperature
    routing = routed(scored, make_pairs(experts))
    return loss_of("cosine_balance", routing, dims={"score_function": score_function}, **options)


def test_cosine_balance_by_hand() -> None:
    # tau_0 = 0.3 turns 0.3 ln 3 into odds of 3: P = 3/4, 1/4 and 1/2, 1/2.
    cosine_TE = torch.tensor([[0.3 * math.log(3), 0.0], [0.2, 0.2]])
    assert value([[0], [0]], cosine_TE).item() == pytest.approx(2 * 0.625)
    assert value([[0], [1]], cosine_TE).item() == pytest.approx(2 * (0.625 + 0.375) / 2)
    assert value([[1], [1]], cosine_TE).item() == pytest.approx(2 * 0.375)


@pytest.mark.parametrize(
    ("words", "options", "tau"),
    [
        ({"softmax_of_scores"}, {}, 0.3),
        ({"elementwise"}, {}, 0.07),
        ({"elementwise"}, {"temperature": 0.5}, 0.5),
        (set(), {}, 0.3),
    ],
)
def test_the_temperature_is_by_the_score_function_or_the_users(
    words: set[str], options: dict[str, Any], tau: float
) -> None:
    cosine_TE = torch.tensor([[0.1, 0.0]])
    expected = 2 / (1 + math.exp(-0.1 / tau))
    loss = value([[0]], cosine_TE, score_function=frozenset(words), **options)
    assert loss.item() == pytest.approx(expected)


def test_value_and_gradient_of_equation_9() -> None:
    generator = torch.Generator().manual_seed(1)
    cosine_TE = 2 * torch.rand(6, 4, generator=generator, dtype=torch.float64) - 1
    experts, t = [[0], [0], [2], [0], [1], [2]], [3 / 6, 1 / 6, 2 / 6, 0.0]

    def plain(cosine_TE: Tensor) -> Tensor:
        terms = []
        for token in range(6):
            odds = [(cosine_TE[token, i] / 0.3).exp() for i in range(4)]
            terms += [t[i] * odds[i] / sum(odds) for i in range(4)]
        return 4 / 6 * torch.stack(terms).sum()

    assert_alike(functools.partial(value, experts), plain, cosine_TE, rtol=1e-6, atol=1e-7)


def test_first_choices_alone_count_where_the_user_says_so() -> None:
    cosine_TE = torch.tensor([[0.3 * math.log(3), 0.0, 0.0]])  # P = 3/5, 1/5, 1/5
    assert value([[0, 1]], cosine_TE).item() == pytest.approx(3 * (0.6 + 0.2) / 2)
    assert value([[0, 1]], cosine_TE, first_choice=True).item() == pytest.approx(3 * 0.6)


def test_the_softmax_runs_over_the_candidates() -> None:
    cosine_TE = torch.tensor([[0.3 * math.log(3), 0.0, 0.9], [0.0, 0.0, 0.0]], requires_grad=True)
    candidates_TE = torch.tensor([[True, True, False], [False, False, False]])
    loss = value([[0]], cosine_TE, candidates_TE)
    loss.backward()
    assert loss.item() == pytest.approx(3 * 0.75 / 2)
    gradient_TE = gradient_of(cosine_TE)
    assert gradient_TE.isfinite().all() and gradient_TE[0, 0] > 0
    assert gradient_TE[0, 2] == 0 and not gradient_TE[1].any()


def test_the_learned_temperature_gets_no_gradient_from_it() -> None:
    layer = make_layer(moe_config(num_experts=4, router={"scorer": "cosine"}, losses={"cosine_balance": 1.0}))
    (layer(make_hidden(24)) * 0).sum().backward()
    scorer: Any = layer.router.scorer
    assert not scorer.log_temperature.grad.any()
    assert scorer.weight.grad.any() and scorer.embedding.grad.any()
    with torch.no_grad():
        before = observed(layer).losses["cosine_balance"]
        scorer.log_temperature.add_(1.0)
        layer(make_hidden(24))
        assert torch.equal(observed(layer).losses["cosine_balance"], before)
