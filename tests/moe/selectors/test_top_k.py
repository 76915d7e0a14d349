"""top_k: hand-readable choices, the four weight kinds and their gradients, too few candidates."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megamoe.errors import UserError
from tests.moe.build import make_layer, make_part, moe_config

# As softmax gives for scores log(10 p).
PROBS = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.05, 0.05, 0.4], [0.3, 0.4, 0.2, 0.1]])
SCORES = (PROBS * 10).log()


def test_choices_by_hand() -> None:
    pairs = make_part("selector", "top_k", k=2)(PROBS, SCORES, None)
    assert pairs.token_N.tolist() == [0, 0, 1, 1, 2, 2]
    assert pairs.expert_N.tolist() == [3, 2, 0, 3, 1, 0]
    assert pairs.choice_N.tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("raw", [0.4, 0.3, 0.5, 0.4, 0.4, 0.3]),
        ("renormalised", [4 / 7, 3 / 7, 5 / 9, 4 / 9, 4 / 7, 3 / 7]),
        ("kept_softmax", [4 / 7, 3 / 7, 5 / 9, 4 / 9, 4 / 7, 3 / 7]),
        ("one", [1.0] * 6),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_weights_by_hand(kind: str, expected: list[float], scale: float) -> None:
    pairs = make_part("selector", "top_k", k=2, weights=kind, scale=scale)(PROBS, SCORES, None)
    torch.testing.assert_close(pairs.weight_N, scale * torch.tensor(expected))


def test_kept_softmax_takes_the_scores_and_renormalised_the_values() -> None:
    probs_TE, scores_TE = torch.tensor([[0.8, 0.4, 0.1]]), torch.tensor([[math.log(3), 0.0, -1.0]])
    weights = {
        kind: make_part("selector", "top_k", num_experts=3, k=2, weights=kind)(probs_TE, scores_TE, None)
        for kind in ("kept_softmax", "renormalised")
    }
    torch.testing.assert_close(weights["kept_softmax"].weight_N, torch.tensor([3 / 4, 1 / 4]))
    torch.testing.assert_close(weights["renormalised"].weight_N, torch.tensor([2 / 3, 1 / 3]))


def one_raw(p: Tensor, s: Tensor) -> Tensor:
    return torch.stack([p[0], p[2]])


def one_renormalised(p: Tensor, s: Tensor) -> Tensor:
    return torch.stack([p[0], p[2]]) / (p[0] + p[2])


def one_kept_softmax(p: Tensor, s: Tensor) -> Tensor:
    return torch.stack([s[0].exp(), s[2].exp()]) / (s[0].exp() + s[2].exp())


@pytest.mark.parametrize(
    ("kind", "formula"),
    [("raw", one_raw), ("renormalised", one_renormalised), ("kept_softmax", one_kept_softmax)],
)
def test_gradients_of_the_weights(kind: str, formula: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Of one token that chooses the experts 0 and 2, down to the scores under a sigmoid."""
    selector = make_part("selector", "top_k", k=2, weights=kind, scale=1.5)
    gradients = []
    for plain in (False, True):
        scores_E = torch.tensor([1.5, -0.3, 0.7, -2.0], dtype=torch.float64, requires_grad=True)
        probs_E = 1 / (1 + (-scores_E).exp())
        if plain:
            weight_K = 1.5 * formula(probs_E, scores_E)
        else:
            weight_K = selector(probs_E[None], scores_E[None], None).weight_N
        (weight_K * torch.tensor([1.0, -3.0])).sum().backward()
        gradients.append(scores_E.grad)
    assert gradients[1] is not None and gradients[1].abs().sum() > 0.01
    torch.testing.assert_close(gradients[0], gradients[1])


def test_the_weight_one_has_no_gradient() -> None:
    pairs = make_part("selector", "top_k", weights="one")(PROBS.clone().requires_grad_(), SCORES, None)
    assert not pairs.weight_N.requires_grad


@pytest.mark.parametrize("kind", ["raw", "renormalised", "kept_softmax", "one"])
def test_a_token_with_few_candidates_has_fewer_pairs(kind: str) -> None:
    candidates_TE = torch.tensor([[True] * 4, [False, True, False, False], [False] * 4])
    scores_TE = SCORES.clone().requires_grad_()
    probs_TE = scores_TE.exp() / 10 * candidates_TE
    pairs = make_part("selector", "top_k", k=2, weights=kind)(probs_TE, scores_TE, candidates_TE)
    assert pairs.token_N.tolist() == [0, 0, 1]
    assert pairs.expert_N.tolist() == [3, 2, 1]
    assert pairs.choice_N.tolist() == [0, 1, 0]
    assert pairs.weight_N[2].item() == pytest.approx(0.05 if kind == "raw" else 1)
    (pairs.weight_N.sum() + scores_TE.sum()).backward()
    assert scores_TE.grad is not None and scores_TE.grad.isfinite().all()


def test_values_that_all_underflow_give_weight_zero() -> None:
    pairs = make_part("selector", "top_k", k=2)(torch.zeros(1, 4), torch.full((1, 4), -200.0), None)
    assert pairs.weight_N.tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["renormalised", "kept_softmax"])
def test_normalised_weights_are_refused_at_k_1(kind: str) -> None:
    message = f"moe.router.selector: with k: 1 the weights '{kind}' are always 1 .*set weights: raw"
    with pytest.raises(UserError, match=message):
        moe_config(router={"selector": {"k": 1, "weights": kind}})


def test_k_is_at_least_1_and_at_most_the_experts() -> None:
    with pytest.raises(UserError, match="moe.router.selector: k must be at least 1"):
        moe_config(router={"selector": {"k": 0}})
    config = moe_config(num_experts=4, router={"selector": {"k": 5}})
    with pytest.raises(UserError, match="^moe.router.selector.k: found 5, .* only 4 experts .* k <= 4$"):
        make_layer(config)
