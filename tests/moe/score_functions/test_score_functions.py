"""Score functions: scores to p, over all experts and over candidates."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.moe.part import StepContext
from tests.support.moe.build import assert_alike, make_hidden, make_part, make_router

SCORES = torch.tensor([[0.0, math.log(2), math.log(3), math.log(4)]])
SOME = torch.tensor([[True, False, True, False]])
NONE = torch.zeros(1, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("score_function", "options", "candidates_TE", "expected"),
    [
        ("softmax", {}, None, [0.1, 0.2, 0.3, 0.4]),
        ("softmax", {"temperature": 0.5}, None, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        ("softmax", {}, SOME, [0.25, 0, 0.75, 0]),
        ("softmax", {"over": "all"}, None, [0.1, 0.2, 0.3, 0.4]),
        ("softmax", {"over": "all"}, SOME, [0.1, 0, 0.3, 0]),
        ("softmax", {"over": "all"}, NONE, [0, 0, 0, 0]),
        ("sigmoid", {}, None, [1 / 2, 2 / 3, 3 / 4, 4 / 5]),
        ("sigmoid", {"temperature": 0.5}, SOME, [1 / 2, 0, 9 / 10, 0]),
        ("sqrt_softplus", {}, None, [math.log(x) ** 0.5 for x in (2, 3, 4, 5)]),
        ("sqrt_softplus", {"temperature": 0.5}, SOME, [math.log(2) ** 0.5, 0, math.log(10) ** 0.5, 0]),
        ("relu", {}, None, [0, math.log(2), math.log(3), math.log(4)]),
        ("relu", {}, SOME, [0, 0, math.log(3), 0]),
    ],
)
def test_by_hand(
    score_function: str, options: dict[str, Any], candidates_TE: Tensor | None, expected: list[float]
) -> None:
    probs_TE = make_part("score_function", score_function, **options)(SCORES, candidates_TE)
    torch.testing.assert_close(probs_TE, torch.tensor([expected]).float())
    assert [p == 0 for p in expected] == (probs_TE[0] == 0).tolist()


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("candidates_TE", [SOME, NONE], ids=["some", "none"])
def test_a_restricted_expert_gets_no_gradient(score_function: str, candidates_TE: torch.Tensor) -> None:
    scores_TE = SCORES.clone().requires_grad_()
    probs_TE = make_part("score_function", score_function)(scores_TE, candidates_TE)
    (probs_TE * torch.arange(1.0, 5.0)).sum().backward()
    assert torch.equal(probs_TE != 0, candidates_TE)
    assert scores_TE.grad is not None
    assert torch.equal(scores_TE.grad != 0, candidates_TE)


def test_skywork_normalises_scores_with_a_bias() -> None:
    """z = W x + b, p = softmax((z - mean) / std), std of the population; two experts of eight."""
    router, hidden_TH = make_router(8, "skywork_moe", capacity="none"), make_hidden(20)
    scorer: Any = router.scorer
    with torch.no_grad():
        scorer.bias.copy_(torch.arange(8.0))
        routing = router(hidden_TH, StepContext())
        z_TE = hidden_TH @ scorer.weight.T + torch.arange(8.0)
    std_T1, mean_T1 = torch.std_mean(z_TE, dim=1, correction=0, keepdim=True)
    probs_TE = ((z_TE - mean_T1) / std_T1).softmax(-1)
    torch.testing.assert_close(routing.probs_TE, probs_TE)
    assert torch.equal(routing.pairs.expert_N.view(20, 2), probs_TE.topk(2).indices)


def test_softmax_over_all_experts_sends_gradient_to_all() -> None:
    """dp_0/ds = p_0 (delta - p), of the softmax over all four experts."""
    scores_TE = SCORES.clone().requires_grad_()
    make_part("score_function", "softmax", over="all")(scores_TE, SOME)[0, 0].backward()
    torch.testing.assert_close(scores_TE.grad, torch.tensor([[0.09, -0.02, -0.03, -0.04]]))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize(
    ("score_function", "options"),
    [("softmax", {}), ("softmax", {"over": "all"}), ("sigmoid", {}), ("sqrt_softplus", {})],
)
def test_log_values_are_the_logarithms_of_p_up_to_a_constant(
    score_function: str, options: dict[str, Any], temperature: float
) -> None:
    part = make_part("score_function", score_function, temperature=temperature, **options)
    difference_TE = part(SCORES, None).log() - part.log_values(SCORES)
    torch.testing.assert_close(difference_TE, difference_TE[:, :1].expand(1, 4))
    if part.elementwise:
        torch.testing.assert_close(difference_TE, torch.zeros(1, 4))


def test_sqrt_softplus_far_below_zero() -> None:
    """p is exp(s/2) there; where even that underflows, value and gradient stay finite."""
    part, scores_TE = make_part("score_function", "sqrt_softplus"), torch.tensor([[-200.0, -80, -16, 30]])
    scores_TE.requires_grad_()
    probs_TE = part(scores_TE, None)
    torch.testing.assert_close(probs_TE[0, 1:], torch.tensor([math.exp(-40), math.exp(-8), 30**0.5]))
    torch.testing.assert_close(part.log_values(scores_TE)[0], torch.tensor([-100, -40, -8, math.log(30) / 2]))
    probs_TE.sum().backward()
    assert scores_TE.grad is not None and scores_TE.grad.isfinite().all()


def test_normalised_softmax_by_hand() -> None:
    """Scores 1, 3 have mean 2 and deviation 1: a softmax of -scale, scale, whatever their size."""
    part = make_part("score_function", "normalised_softmax", 2, scale=math.log(3))
    for size in (1.0, 1e3):
        torch.testing.assert_close(part(size * torch.tensor([[1.0, 3.0]]), None), torch.tensor([[0.1, 0.9]]))
    torch.testing.assert_close(part(torch.full((1, 2), 7.0), None), torch.full((1, 2), 0.5))
    only_TE = part(torch.tensor([[1.0, 3.0]]), torch.tensor([[True, False]]))
    assert only_TE.tolist() == [[1.0, 0.0]]


def test_normalised_softmax_has_the_gradient_of_its_formula() -> None:
    scores_TE = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    factor_TE = torch.arange(15.0).view(3, 5).cos()
    part = make_part("score_function", "normalised_softmax", 5, scale=1.5)

    def plain(s_TE: Tensor) -> Tensor:
        z_TE = (s_TE - s_TE.mean(1, keepdim=True)) / s_TE.std(1, correction=0, keepdim=True)
        return ((1.5 * z_TE).softmax(1) * factor_TE).sum()

    assert_alike(lambda s_TE: (part(s_TE, None) * factor_TE).sum(), plain, scores_TE)
