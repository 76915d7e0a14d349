"""Load: hand-worked numbers, an independent fp64 formula with its gradient, the noise's own statistics."""

import math
from statistics import NormalDist

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

PHI = NormalDist().cdf


def value(
    clean_TE: Tensor, std_TE: Tensor, noisy_TE: Tensor, k: int, candidates_TE: Tensor | None = None
) -> Tensor:
    scored = make_scored(noisy_TE, None, candidates_TE, clean_TE=clean_TE, noise_std_TE=std_TE)
    return loss_of("load", routed(scored, make_pairs([])), dims={"num_choices": k})


def squared_cv(loads: list[float]) -> float:
    mean = sum(loads) / len(loads)
    return sum((load - mean) ** 2 for load in loads) / len(loads) / mean**2


def test_load_by_hand() -> None:
    clean_TE, std_TE = torch.tensor([[1.0, 0.5, 0.0]]), torch.tensor([[1.0, 0.5, 2.0]])
    noisy_TE = torch.tensor([[0.4, 1.5, 0.9]])
    # k = 1: the largest of the others is 1.5, 0.9, 1.5. k = 2: the second of the others is 0.9, 0.4, 0.4.
    first = [PHI(1 - 1.5), PHI((0.5 - 0.9) / 0.5), PHI((0 - 1.5) / 2)]
    second = [PHI(1 - 0.9), PHI((0.5 - 0.4) / 0.5), PHI((0 - 0.4) / 2)]
    assert value(clean_TE, std_TE, noisy_TE, 1).item() == pytest.approx(squared_cv(first), rel=1e-5)
    assert value(clean_TE, std_TE, noisy_TE, 2).item() == pytest.approx(squared_cv(second), rel=1e-5)


def drawn(seed: int = 0, num_tokens: int = 6, num_experts: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    clean_TE, raw_TE, eps_TE = torch.randn(
        3, num_tokens, num_experts, generator=generator, dtype=torch.float64
    )
    return clean_TE, raw_TE, eps_TE


@pytest.mark.parametrize("k", [1, 2, 4])
def test_value_and_gradient_of_the_plain_formula(k: int) -> None:
    clean, raw, eps_TE = drawn()

    def ours(clean_TE: Tensor, raw_TE: Tensor) -> Tensor:
        std_TE = torch.nn.functional.softplus(raw_TE)
        return value(clean_TE, std_TE, clean_TE + eps_TE * std_TE, k)

    def plain(clean_TE: Tensor, raw_TE: Tensor) -> Tensor:
        std_TE = torch.log1p(raw_TE.exp())
        noisy_TE = clean_TE + eps_TE * std_TE
        loads = []
        for i in range(5):
            others = [j for j in range(5) if j != i]
            kth_T = noisy_TE[:, others].sort(dim=1, descending=True).values[:, k - 1]
            loads.append((0.5 * torch.erfc((kth_T - clean_TE[:, i]) / std_TE[:, i] / math.sqrt(2))).sum())
        load_E = torch.stack(loads)
        return (load_E**2).mean() / load_E.mean() ** 2 - 1

    assert_alike(ours, plain, clean, raw)


def test_experts_that_are_no_candidates_have_no_load() -> None:
    clean_TE = torch.tensor([[1.0, 0.5, 0.0, 3.0]] * 2)
    std_TE = torch.ones(2, 4, requires_grad=True)
    candidates_TE = torch.tensor([[True, True, True, False], [False, False, True, False]])
    # Second token: no more candidates than choices, so that its only one is certain.
    loads = [PHI(1.0 - 0.5), PHI(0.5 - 1.0), PHI(0.0 - 1.0) + 1, 0.0]
    clean_TE.requires_grad_()
    loss = value(clean_TE, std_TE, clean_TE, 1, candidates_TE)
    loss.backward()
    assert loss.item() == pytest.approx(squared_cv(loads), rel=1e-5)
    by_clean_TE, by_std_TE = gradient_of(clean_TE), gradient_of(std_TE)
    assert by_clean_TE.isfinite().all() and by_clean_TE[0, :3].all()
    assert not by_clean_TE[1].any() and by_clean_TE[0, 3] == 0
    assert by_std_TE.isfinite().all() and not by_std_TE[1].any()


def test_noise_that_underflows_leaves_all_finite() -> None:
    raw_TE = torch.tensor([[-200.0, -200.0, -200.0], [-200.0, 0.0, 1.0]], requires_grad=True)
    clean_TE = torch.tensor([[1.0, 1.0, 0.0], [2.0, 0.0, 1.0]], requires_grad=True)
    std_TE = torch.nn.functional.softplus(raw_TE)
    assert (std_TE == 0).any()
    loss = value(clean_TE, std_TE, clean_TE, 1)
    loss.backward()
    assert loss.isfinite()
    assert gradient_of(raw_TE).isfinite().all() and gradient_of(clean_TE).isfinite().all()
    assert loss.item() == pytest.approx(
        squared_cv([0.5 + 1, 0.5 + PHI(-2 / math.log(2)), PHI(-1 / 1.313262)]), rel=1e-4
    )


def test_noise_under_the_smallest_counts_as_that_and_learns_nothing_from_it() -> None:
    clean_TE = torch.tensor([[0.0, 5e-7, -1.0]], dtype=torch.float64)
    losses = []
    for small in (1e-8, 1e-6):
        std_TE = torch.tensor([[small, 1.0, 1.0]], dtype=torch.float64, requires_grad=True)
        losses.append(value(clean_TE, std_TE, clean_TE, 1))
        losses[-1].backward()
        assert gradient_of(std_TE)[0, 0] == 0 and gradient_of(std_TE)[0, 2] != 0
    assert losses[0] == losses[1]


NOISY = {"scorer": {"name": "noisy", "start": "normal"}, "selector": {"k": 2, "weights": "kept_softmax"}}


def test_a_layer_passes_the_loss_its_routing_in_training_and_evaluation() -> None:
    layer = make_layer(moe_config(num_experts=4, router=NOISY, losses={"load": 0.1}))
    hidden_TH = make_hidden(24)
    for mode in (True, False):
        routing = layer.train(mode).router(hidden_TH, layer.context)
        assert torch.equal(routing.scores_TE, routing.extras["clean_TE"]) != mode
        layer(hidden_TH)
        expected = value(routing.extras["clean_TE"], routing.extras["noise_std_TE"], routing.scores_TE, 2)
        assert torch.equal(observed(layer).losses["load"], expected.detach())
    assert expected > 0
