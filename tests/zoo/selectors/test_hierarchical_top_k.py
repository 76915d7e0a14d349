"""hierarchical_top_k: groups, then experts; weights are products of two softmaxes over what was kept."""

import math

import pytest
import torch
from torch import Tensor

from megamoe.moe.part import StepContext
from megamoe.moe.routing import Pairs
from tests.support.moe.build import gradient_of, make_part, make_scored

# Odds by group, and inside the three groups of three experts.
GROUPS = torch.tensor([[3.0, 9.0, 1.0]])
INNER = torch.tensor([[1.0, 5.0, 1.5, 1.0, 2.0, 2.5, 90.0, 99.0, 95.0]])


def select(
    group_TG: Tensor, inner_TE: Tensor, candidates_TE: Tensor | None = None, groups: int = 2, k: int = 2
) -> Pairs:
    """Pairs of one selector over raw scores of both levels."""
    selector = make_part("selector", "hierarchical_top_k", inner_TE.shape[1], groups=groups, k=k)
    extras = {"group_scores_TG": group_TG, "inner_scores_TE": inner_TE}
    scored = make_scored(torch.zeros_like(inner_TE), candidates_TE=candidates_TE, **extras)
    pairs: Pairs = selector(scored, StepContext())
    assert scored.extras["chosen_groups_TA"].shape == (len(inner_TE), groups)
    return pairs


def test_choices_and_weights_by_hand() -> None:
    """Groups 1 and 0 with 3/4 and 1/4, though group 2 has the highest inner scores; in them 5:4, 10:3."""
    pairs = select(GROUPS.log(), INNER.log())
    assert pairs.token_N.tolist() == [0] * 4 and pairs.choice_N.tolist() == [0, 1, 2, 3]
    assert pairs.expert_N.tolist() == [5, 4, 1, 2]
    expected_N = torch.tensor([3 / 4 * 5 / 9, 3 / 4 * 4 / 9, 1 / 4 * 10 / 13, 1 / 4 * 3 / 13])
    torch.testing.assert_close(pairs.weight_N, expected_N)


def test_the_order_of_choice_is_that_of_the_weights_across_groups() -> None:
    pairs = select(torch.tensor([[3.0, 4.0, 1.0]]).log(), INNER.log())
    assert pairs.expert_N.tolist() == [1, 5, 4, 2]
    assert pairs.weight_N.diff().lt(0).all()


def plain_weights(group_G: Tensor, inner_E: Tensor, groups: int, k: int) -> dict[int, Tensor]:
    """Expert -> weight of one token."""
    size = len(inner_E) // len(group_G)
    kept = sorted(range(len(group_G)), key=lambda group: -group_G[group].item())[:groups]
    weights = {}
    for group in kept:
        mine = range(group * size, (group + 1) * size)
        best = sorted(mine, key=lambda expert: -inner_E[expert].item())[:k]
        for expert in best:
            primary = group_G[group].exp() / sum(group_G[other].exp() for other in kept)
            weights[expert] = primary * inner_E[expert].exp() / sum(inner_E[other].exp() for other in best)
    return weights


@pytest.mark.parametrize(("groups", "k"), [(2, 2), (3, 4), (4, 2)])
def test_weights_and_gradients_against_the_formula(groups: int, k: int) -> None:
    generator = torch.Generator().manual_seed(4)
    group_TG, inner_TE = (torch.randn(6, n, generator=generator, dtype=torch.float64) for n in (4, 16))
    slope_E = torch.arange(1.0, 17.0, dtype=torch.float64).sqrt()
    weights, slopes = [], []
    for plain in (False, True):
        leaves = group_TG.clone().requires_grad_(), inner_TE.clone().requires_grad_()
        if plain:
            rows = [plain_weights(leaves[0][token], leaves[1][token], groups, k) for token in range(6)]
            found = {(t, expert): weight for t, row in enumerate(rows) for expert, weight in row.items()}
        else:
            pairs = select(*leaves, groups=groups, k=k)
            keys = zip(pairs.token_N.tolist(), pairs.expert_N.tolist(), strict=True)
            found = dict(zip(keys, pairs.weight_N, strict=True))
        torch.stack([weight * slope_E[expert] for (_, expert), weight in found.items()]).sum().backward()
        weights.append(dict(sorted(found.items())))
        slopes.append([gradient_of(leaf) for leaf in leaves])
    assert weights[0].keys() == weights[1].keys()
    for mine, right in zip(weights[0].values(), weights[1].values(), strict=True):
        torch.testing.assert_close(mine, right)
    for mine, right in zip(*slopes, strict=True):
        assert right.abs().max() > 0.01
        torch.testing.assert_close(mine, right)


def test_masks_take_experts_out_before_the_softmax() -> None:
    """Token 0 loses expert 5; 1 keeps one expert in group 0; 2 keeps group 2 alone; 3 keeps none."""
    candidates_TE = torch.ones(4, 9, dtype=torch.bool)
    candidates_TE[0, 5] = False
    candidates_TE[1, [0, 1]] = False
    candidates_TE[2, :6] = False
    candidates_TE[3] = False
    leaves = GROUPS.log().repeat(4, 1).requires_grad_(), INNER.log().repeat(4, 1).requires_grad_()
    pairs = select(*leaves, candidates_TE)
    assert pairs.token_N.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert pairs.expert_N.tolist() == [4, 3, 1, 2, 5, 4, 2, 7, 8]
    expected = [3 / 4 * 2 / 3, 3 / 4 / 3, 1 / 4 * 10 / 13, 1 / 4 * 3 / 13]
    expected += [3 / 4 * 5 / 9, 3 / 4 * 4 / 9, 1 / 4, 99 / 194, 95 / 194]
    torch.testing.assert_close(pairs.weight_N, torch.tensor(expected))
    (pairs.weight_N * torch.arange(9)).sum().backward()
    for leaf in leaves:
        assert leaf.grad is not None and leaf.grad.isfinite().all() and not leaf.grad[3].any()


def test_num_choices_is_of_all_groups_together() -> None:
    assert make_part("selector", "hierarchical_top_k", 16, groups=3, k=2).num_choices == 6
    assert make_part("selector", "hierarchical_top_k").num_choices == 4  # the paper's 2 and 2


def test_scores_far_apart_stay_finite() -> None:
    group_TG, inner_TE = torch.tensor([[500.0, -500.0]]), torch.tensor([[math.inf, 0.0, -600.0, 600.0]])
    inner_TE = inner_TE.clamp_max(1e30).requires_grad_()
    pairs = select(group_TG, inner_TE)
    assert pairs.weight_N.tolist() == [1, 0, 0, 0]
    pairs.weight_N.sum().backward()
    assert inner_TE.grad is not None and inner_TE.grad.isfinite().all()


def test_weights_that_underflow_stand_in_the_order_of_their_logarithms() -> None:
    """Group 0's second expert has weight e^-200, group 1's two about e^-150 and e^-151."""
    pairs = select(torch.tensor([[150.0, 0.0, -9.0]]), torch.tensor([[0.0, -200, -300, 1, 0, -5, 0, 0, 0]]))
    assert pairs.expert_N.tolist() == [0, 3, 4, 1]
    assert pairs.weight_N.tolist() == [1, 0, 0, 0]
