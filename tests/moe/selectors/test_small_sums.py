"""Renormalised weights of experts whose p underflow: p over their sum, as double-precision logarithms say."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megamoe.kernels.choice import Kernels
from megamoe.moe.part import Dims, StepContext
from megamoe.moe.routing import Pairs, Scored
from megamoe.registry import get_part
from tests.support.moe.build import make_part

# The tokens: ordinary, all p small, all p 0 in fp32, one ordinary beside small ones, far apart.
LEVELS_T = torch.tensor([0.0, -40, -60, -90, -300, 0, -90])[:, None]
SPREAD_TE = torch.tensor([[0.5, -1, 2, 0, 1, -2]]).repeat(7, 1)
SPREAD_TE[5, 1:] -= 80
SPREAD_TE[6] *= 30
SCORES_TE = LEVELS_T + SPREAD_TE.roll(1, 0)
LOGS = {
    "sigmoid": lambda s_TE: functional.logsigmoid(s_TE / 0.5),
    "sqrt_softplus": lambda s_TE: functional.softplus(s_TE / 0.5).log() / 2,
    "softmax": lambda s_TE: (s_TE / 0.5).log_softmax(-1),
}


def scored_by(name: str, scores_TE: Tensor, candidates_TE: Tensor | None) -> Scored:
    """Scores under a function with a bias, which chooses without a look at p: the first experts."""
    function = make_part("score_function", name, 6, temperature=0.5, bias_update=0.1)
    ranking_TE = torch.arange(6, 0, -1.0).expand(len(scores_TE), 6)
    if candidates_TE is not None:
        ranking_TE = ranking_TE.masked_fill(~candidates_TE, -torch.inf)
    probs_TE = function(scores_TE, candidates_TE)
    extras = {"table_TK": torch.tensor([[0, 1, 2]]).repeat(len(scores_TE), 1)}
    affinities_TE = function(scores_TE, None)
    return Scored(
        scores_TE, affinities_TE, probs_TE, ranking_TE, candidates_TE, extras, score_function=function
    )


SELECTORS: list[tuple[str, dict[str, Any]]] = [
    ("top_k", {"k": 3}),
    ("top_k", {"k": 3, "scale": 2.5, "renormalise": "after_drops"}),
    ("sample", {"k": 3, "weights": "renormalised"}),
    ("entropy_aware", {"min_k": 3, "max_k": 3, "weights": "renormalised"}),
]
TABLE = ("table", {"k": 3, "weights": "renormalised"})  # which takes no masks


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize(
    ("selector", "options", "masked"),
    [(*each, masked) for each in SELECTORS for masked in (False, True)] + [(*TABLE, False)],
)
def test_they_sum_to_1(
    selector: str, options: dict[str, Any], name: str, masked: bool, compiled: bool
) -> None:
    """Weights and gradients of every selector, also of some candidates, and without pairs of choice 0."""
    candidates_TE = (torch.arange(6) != 1).expand(7, 6) & (torch.arange(7) != 2)[:, None] if masked else None
    config = get_part("selector", selector).Config(**options)
    part = get_part("selector", selector)(config, Dims(4, 6, kernels=Kernels(compiled=compiled))).eval()
    drops = "renormalise" in options
    sides = [SCORES_TE.clone().requires_grad_(), SCORES_TE.double().requires_grad_()]
    pairs: Pairs = part(scored_by(name, sides[0], candidates_TE), StepContext())
    if drops:
        pairs = part.after_drops(pairs.keep(pairs.choice_N > 0))
    chosen_TE = torch.zeros(7, 6, dtype=torch.bool)
    chosen_TE[pairs.token_N, pairs.expert_N] = True
    exact_TE = LOGS[name](sides[1]).masked_fill(~chosen_TE, -torch.inf).softmax(-1) * options.get("scale", 1)
    exact_N = exact_TE[pairs.token_N, pairs.expert_N]
    torch.testing.assert_close(pairs.weight_N.double(), exact_N, rtol=2e-5, atol=1e-7)
    sent_N = torch.linspace(-1, 2, len(exact_N), dtype=torch.float64)
    found, exact = (
        torch.autograd.grad((weight_N * sent_N).sum(), side)[0]
        for weight_N, side in zip((pairs.weight_N, exact_N), sides, strict=True)
    )
    torch.testing.assert_close(found.double(), exact.nan_to_num(), rtol=2e-5, atol=1e-6)


def test_a_softmax_chosen_by_its_scores_looks_at_no_sum() -> None:
    """Its best experts have at least 1/E of the sum."""
    function = make_part("score_function", "softmax", 6)
    probs_TE = SCORES_TE.softmax(-1)
    scored = Scored(SCORES_TE, probs_TE, probs_TE, SCORES_TE, score_function=function)
    assert (scored.small_slope(best=True), scored.small_slope()) == (None, 1.0)


@pytest.mark.parametrize("compiled", [False, True])
def test_ordinary_tokens_keep_their_bits(compiled: bool) -> None:
    """Values and gradients, beside tokens of small sums; transformers' form, p / (sum + 1e-20), is near."""
    selector = get_part("selector", "top_k")(
        get_part("selector", "top_k").Config(k=3), Dims(4, 6, kernels=Kernels(compiled=compiled))
    )
    scores_TE = torch.cat([SPREAD_TE[:5] + torch.tensor([0, -5, -10, -14, -14.5])[:, None], SCORES_TE])
    sides = [scores_TE.clone().requires_grad_() for _ in range(2)]
    found_N = selector(scored_by("sigmoid", sides[0], None), StepContext()).weight_N
    best_TK = (sides[1] / 0.5).sigmoid()[:, :3]
    plain_TK = best_TK / best_TK.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    found_TK = found_N.view(-1, 3)
    assert torch.equal(found_TK[:5], plain_TK[:5])
    total_T1 = best_TK.sum(dim=-1, keepdim=True)
    assert total_T1[4] > 1e-13
    torch.testing.assert_close(found_TK[:5], (best_TK / (total_T1 + 1e-20))[:5], rtol=3e-7, atol=0)
    factor_TK = torch.arange(15.0).cos().view(5, 3)
    gradients = [
        torch.autograd.grad((weight_TK[:5] * factor_TK).sum(), side)[0][:5]
        for weight_TK, side in zip((found_TK, plain_TK), sides, strict=True)
    ]
    assert torch.equal(*gradients)
