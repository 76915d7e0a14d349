"""The hierarchical scorer: p(group) p(expert given group), linear or noisy at both levels."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megamoe.moe.part import StepContext
from tests.support.moe.build import HIDDEN, make_context, make_hidden, make_part

CONTEXT = StepContext(seed=3, step=2)
STARTED = {"seed": 1, "init_std": 0.4}
NAMES = ("group_weight", "weight", "group_noise_weight", "noise_weight")


def plain_probs(group_weight: Tensor, weight: Tensor, hidden_TH: Tensor) -> Tensor:
    """[T, E] by the product of two softmaxes, group by group."""
    group_TG = (hidden_TH @ group_weight.T).softmax(1)
    size = len(weight) // len(group_weight)
    columns = []
    for group in range(len(group_weight)):
        inner_TS = (hidden_TH @ weight[group * size : (group + 1) * size].T).softmax(1)
        columns.append(group_TG[:, group : group + 1] * inner_TS)
    return torch.cat(columns, dim=1)


def test_p_by_hand() -> None:
    """Groups 0.75, 0.25; inside 0.5, 0.5 and 0.8, 0.2."""
    scorer = make_part("scorer", "hierarchical", groups=2)
    for weight, odds in ((scorer.group_weight, [3, 1]), (scorer.weight, [1, 1, 4, 1])):
        weight.data.zero_()[:, 0] = torch.tensor(odds).log()
    scores_TE, extras = scorer(torch.eye(HIDDEN)[:1], CONTEXT)
    torch.testing.assert_close(scores_TE.exp(), torch.tensor([[0.375, 0.375, 0.2, 0.05]]))
    torch.testing.assert_close(extras["group_scores_TG"], torch.tensor([[math.log(3), 0.0]]))
    torch.testing.assert_close(extras["inner_scores_TE"], torch.tensor([[0.0, 0.0, math.log(4), 0.0]]))
    assert extras.keys() == {"group_scores_TG", "inner_scores_TE"}


@pytest.mark.parametrize("groups", [2, 3, 6])
def test_softmax_of_the_scores_is_p_and_has_its_gradient(groups: int) -> None:
    scorer = make_part("scorer", "hierarchical", 12, dims=STARTED, groups=groups)
    hidden_TH, slope_TE = make_hidden(5), torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    weights = [scorer.group_weight, scorer.weight]
    probs_TE = scorer(hidden_TH, CONTEXT)[0].softmax(1)
    gradients = torch.autograd.grad((probs_TE * slope_TE).sum(), weights)
    plain = [weight.detach().double().requires_grad_() for weight in weights]
    expected_TE = plain_probs(plain[0], plain[1], hidden_TH.double())
    expected = torch.autograd.grad((expected_TE * slope_TE).sum(), plain)
    torch.testing.assert_close(probs_TE.double(), expected_TE, rtol=1e-5, atol=1e-6)
    for found, right in zip(gradients, expected, strict=True):
        assert right.abs().max() > 0.01
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-5)


def noisy(start: float = 0.0) -> Any:
    scorer = make_part("scorer", "hierarchical", 6, groups=2, noisy=True)
    for number, name in enumerate(NAMES):
        weight = getattr(scorer, name)
        assert not weight.any()  # the paper's start
        generator = torch.Generator().manual_seed(number)
        weight.data = start * torch.randn(weight.shape, generator=generator)
    return scorer


def test_the_noise_is_standard_normal_times_softplus_at_both_levels() -> None:
    scorer, hidden_TH = noisy(0.3), make_hidden(4000)
    _, extras = scorer(hidden_TH, CONTEXT)
    drawn = []
    for level, size, clean_weight, noise_weight in (
        ("group", "G", scorer.group_weight, scorer.group_noise_weight),
        ("inner", "E", scorer.weight, scorer.noise_weight),
    ):
        torch.testing.assert_close(extras[f"{level}_clean_T{size}"], hidden_TH @ clean_weight.T)
        std = functional.softplus(hidden_TH @ noise_weight.T)
        torch.testing.assert_close(extras[f"{level}_std_T{size}"], std)
        drawn.append((extras[f"{level}_scores_T{size}"] - extras[f"{level}_clean_T{size}"]) / std)
    normal = torch.cat(drawn, dim=1).detach()
    assert normal.mean(0).abs().max() < 0.07 and (normal.std(0) - 1).abs().max() < 0.05
    assert ((normal < 1).float().mean() - 0.8413).abs() < 0.01
    assert (torch.corrcoef(normal.T) - torch.eye(8)).abs().max() < 0.08


def test_noise_is_of_training_only_and_keyed_by_token() -> None:
    scorer, hidden_TH = noisy(0.3), make_hidden(8)
    first_TE = scorer(hidden_TH, CONTEXT)[0]
    assert torch.equal(scorer(hidden_TH, StepContext(seed=3, step=2))[0], first_TE)
    assert (scorer(hidden_TH, StepContext(seed=3, step=3))[0] - first_TE).abs().mean() > 0.1
    order_T = torch.tensor([5, 0, 7, 1, 2, 6, 3, 4])
    moved = make_context(seed=3, step=2, token_index_T=order_T)
    torch.testing.assert_close(scorer(hidden_TH[order_T], moved)[0], first_TE[order_T])
    scores_TE, extras = scorer.eval()(hidden_TH, CONTEXT)
    torch.testing.assert_close(extras["inner_scores_TE"], hidden_TH @ scorer.weight.T)
    expected_TE = plain_probs(scorer.group_weight, scorer.weight, hidden_TH)
    torch.testing.assert_close(scores_TE.exp(), expected_TE)
    assert (extras["group_std_TG"] > 0).all()


@pytest.mark.parametrize(("experts", "groups"), [(256, 16), (64, 8), (8, 2), (12, 3), (6, 2), (7, 1), (4, 2)])
def test_the_default_is_about_the_square_root(experts: int, groups: int) -> None:
    with torch.device("meta"):
        scorer = make_part("scorer", "hierarchical", experts)
    assert scorer.group_weight.shape == (groups, HIDDEN)
