"""What holds for every selector: weights and gradients by formula, and choices where fp32 rounds p."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.moe.part import StepContext
from tests.support.moe.build import gradient_of, make_part, make_router, make_scored, route_scores

TOKENS, EXPERTS = 12, 6
TOP_K = {"name": "top_k", "k": 3, "scale": 1.5}


def weights_of(kind: str, scores_K: Tensor, probs_K: Tensor) -> Tensor:
    """Return the weights of a token's chosen experts, from their scores and p."""
    if kind == "kept_softmax":
        return scores_K.exp() / scores_K.exp().sum()
    if kind == "one":
        return probs_K * 0 + 1
    return probs_K / probs_K.sum() if kind == "renormalised" else probs_K


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (TOP_K, "raw"),
        (TOP_K, "renormalised"),
        (TOP_K, "kept_softmax"),
        (TOP_K, "one"),
        ({"name": "threshold", "threshold": 0.65}, None),
        ({"name": "entropy_aware"}, "raw"),
        ({"name": "entropy_aware", "min_k": 2}, "renormalised"),
        ({"name": "expert_choice", "k": 1.5}, None),
        ({"name": "sample", "k": 2}, "raw"),
        ({"name": "sample", "k": 2}, "renormalised"),
        ({"name": "sample", "k": 2}, "one"),
        ({"name": "sinkhorn", "k": 2}, None),
        ({"name": "balanced"}, None),
    ],
    ids=str,
)
def test_weights_and_gradients_are_of_p_whatever_chose(options: dict[str, Any], kind: str | None) -> None:
    """Token by token, for the experts that the selector chose, down to the scores under a sigmoid."""
    options = dict(options) if kind is None else {**options, "weights": kind}
    name, scale = options.pop("name"), options.get("scale", 1.0)
    given_TE = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores_TE, plain_TE = (given_TE.clone().requires_grad_() for _ in range(2))
    drawn_from = {"sampling_scores_TE": torch.zeros(TOKENS, EXPERTS)}
    scored = make_scored(scores_TE, scores_TE.sigmoid(), **drawn_from)
    pairs = make_part("selector", name, EXPERTS, **options)(scored, StepContext(seed=2))
    probs_TE = 1 / (1 + (-plain_TE).exp())
    rows = [pairs.expert_N[pairs.token_N == token] for token in range(TOKENS)]
    weights = [weights_of(kind or "raw", plain_TE[t, row], probs_TE[t, row]) for t, row in enumerate(rows)]
    expected_N = scale * torch.cat(weights)
    torch.testing.assert_close(pairs.weight_N, expected_N, check_dtype=False)
    assert pairs.weight_N.requires_grad == (kind != "one")
    slope_N = torch.arange(1.0, len(expected_N) + 1, dtype=torch.float64).sin()
    (expected_N * slope_N).sum().backward()
    if kind != "one":
        (pairs.weight_N * slope_N).sum().backward()
        assert gradient_of(plain_TE).abs().sum() > 0.1
        torch.testing.assert_close(gradient_of(scores_TE), plain_TE.grad)


@pytest.mark.parametrize(
    ("selector", "experts"),
    [
        ("balanced", [2]),
        ({"name": "sample", "k": 2}, [2, 3]),
        ({"name": "sinkhorn", "k": 2}, [2, 3]),
        ({"name": "entropy_aware", "max_k": 3}, [2, 3, 1]),
        ({"name": "threshold", "threshold": 0.6}, [2, 3, 1]),  # 0.6 of four equal p: three of them
        ({"name": "expert_choice", "k": 4, "allow_non_causal": True}, [2, 3, 1, 0]),
    ],
    ids=str,
)
def test_evaluation_chooses_by_the_scores_whose_p_round_to_1(selector: Any, experts: list[int]) -> None:
    router = make_router(4, score_function="sigmoid", selector=selector).eval()
    assert route_scores(router, torch.tensor([[17.0, 18, 20, 19]])).pairs.expert_N.tolist() == experts
