"""hierarchical_load: SGMoE's smooth load at two levels, by hand and against a plain formula."""

import math
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from megamoe.moe.losses.common import choice_probability
from megamoe.moe.routing import Routing
from tests.support.moe.build import assert_alike, loss_of, make_scored, routed, select

Pieces = dict[str, Tensor]


def pieces(num_tokens: int, num_groups: int, num_experts: int, dtype: torch.dtype = torch.float64) -> Pieces:
    """Clean scores and noise deviations of both levels, with one draw of the noise as scores."""
    generator = torch.Generator().manual_seed(num_tokens)
    found = {}
    for level, columns in (("group", f"TG{num_groups}"), ("inner", f"TE{num_experts}")):
        suffix, count = columns[:2], int(columns[2:])
        clean, noise = torch.randn(2, num_tokens, count, generator=generator, dtype=dtype)
        found[f"{level}_clean_{suffix}"] = clean
        found[f"{level}_std_{suffix}"] = torch.rand(num_tokens, count, generator=generator, dtype=dtype) + 0.2
        found[f"{level}_scores_{suffix}"] = clean + noise
    return found


def routing_of(extras: Pieces, groups: int, k: int) -> Routing:
    scored = make_scored(extras["inner_scores_TE"], **extras)
    return routed(scored, select("hierarchical_top_k", scored, groups=groups, k=k))


def load_loss(extras: Pieces, groups: int, k: int) -> Tensor:
    return loss_of("hierarchical_load", routing_of(extras, groups, k), dims={"num_choices": groups * k})


def phi(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(z / math.sqrt(2)))


def plain_chance(clean: Tensor, scores: Tensor, std: Tensor, i: int, k: int) -> Tensor:
    """P(x, i) of one token, eq. 9: kth_excluding by leaving i out and sorting."""
    others = torch.cat([scores[:i], scores[i + 1 :]])
    if k > len(others):
        return torch.ones((), dtype=clean.dtype)
    return phi((clean[i] - others.sort(descending=True).values[k - 1]) / std[i])


def total(chances: Iterable[Tensor]) -> Tensor:
    return sum(chances, torch.zeros((), dtype=torch.float64))


def plain_loss(extras: Pieces, groups: int, k: int) -> Tensor:
    group = [extras[f"group_{name}_TG"] for name in ("clean", "scores", "std")]
    inner = [extras[f"inner_{name}_TE"] for name in ("clean", "scores", "std")]
    num_tokens, num_groups = group[0].shape
    size = inner[0].shape[1] // num_groups
    loads = []
    for i in range(num_groups):
        of_group = [[part[t] for part in group] for t in range(num_tokens)]
        primary = total(plain_chance(clean, scores, std, i, groups) for clean, scores, std in of_group)
        mine = [t for t in range(num_tokens) if i in group[1][t].topk(groups).indices.tolist()]
        for j in range(size):
            rows = [[part[t, i * size : (i + 1) * size] for part in inner] for t in mine]
            load = total(plain_chance(clean, scores, std, j, k) for clean, scores, std in rows)
            loads.append(primary * load / max(len(mine), 1))
    load_E = torch.stack(loads)
    return ((load_E - load_E.mean()) ** 2).mean() / load_E.mean() ** 2


def test_probabilities_by_hand() -> None:
    """The clean scores are 4, 3, 1 and k = 2: the first two must exceed 1, the last one 3."""
    clean, std = torch.tensor([2.0, 2.0, 2.0]), torch.tensor([1.0, 0.5, 0.5])
    chance = choice_probability([clean, torch.tensor([4.0, 3.0, 1.0]), std], 2)
    torch.testing.assert_close(chance, torch.tensor([0.8413447, 0.9772499, 0.0227501]))


@pytest.mark.parametrize(("groups", "k"), [(2, 2), (3, 2), (4, 3), (2, 4)])
def test_value_and_gradients_against_the_formula(groups: int, k: int) -> None:
    """There are 4 groups of 4; (4, 3) and (2, 4) choose everything at one level."""
    extras = pieces(7, 4, 16)
    assert_alike(
        lambda *parts: load_loss(dict(zip(extras, parts, strict=True)), groups, k),
        lambda *parts: plain_loss(dict(zip(extras, parts, strict=True)), groups, k),
        *extras.values(),
    )


def test_underflowing_noise_stays_finite() -> None:
    extras = {name: part.float() for name, part in pieces(6, 3, 9).items()}
    for name, part in extras.items():
        if "std" in name:
            part.zero_()
        part.requires_grad_()
    value = load_loss(extras, 2, 2)
    value.backward()
    assert value.isfinite()
    assert all(part.grad is not None and part.grad.isfinite().all() for part in extras.values())
