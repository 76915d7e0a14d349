"""StableMoE's balance loss and the light router's distillation: numbers by hand, gradients of formulas."""

import math

import pytest
import torch
from torch import Tensor

from megamoe.moe.routing import Routing
from tests.support.moe.build import assert_alike, gradient_of, loss_of, make_routing

SCORES = torch.tensor(
    [[1.0, 0.0, -1.0], [2.0, 1.0, 0.0], [0.5, -2.0, 0.0], [0.0, 0.0, 1.5]], dtype=torch.float64
)
WANTED = [[0], [0], [0], [2]]  # n = 4/3; (|A| - n) / n = 5/4, -1, -1/4


def routing_of(scores_TE: Tensor, wanted: list[list[int]], phase_1: float | None = None) -> Routing:
    routing = make_routing(wanted, scores_TE, scores_TE.sigmoid())
    if phase_1 is not None:
        routing.extras["phase_1"] = torch.tensor(phase_1)
    return routing


def test_balance_by_hand() -> None:
    values = [1 / (1 + math.exp(-s)) for s in (1.0, 2.0, 0.5, 1.5)]
    expected = (1.25 * sum(values[:3]) - 0.25 * values[3]) / 4
    for phase_1, factor in ((None, 1), (1.0, 1), (0.0, 0)):
        found = loss_of("stable_balance", routing_of(SCORES, WANTED, phase_1))
        assert found.item() == pytest.approx(factor * expected, rel=1e-6)


def test_balance_is_0_where_there_is_balance() -> None:
    assert loss_of("stable_balance", routing_of(SCORES[:, :2], [[0], [1], [1], [0]])).item() == 0


@pytest.mark.parametrize("wanted", [WANTED, [[0, 1], [0, 2], [0, 1], [2]]], ids=["k1", "k2"])
def test_value_and_gradient_of_the_formula(wanted: list[list[int]]) -> None:
    def plain(scores_TE: Tensor) -> Tensor:
        mean = sum(map(len, wanted)) / 3
        total = torch.zeros((), dtype=torch.float64)
        for expert in range(3):
            assigned = [token for token, chosen in enumerate(wanted) if expert in chosen]
            share = (len(assigned) - mean) / mean
            total = total + share * sum(1 / (1 + (-scores_TE[token, expert]).exp()) for token in assigned)
        return total / 4

    assert_alike(
        lambda scores_TE: loss_of("stable_balance", routing_of(scores_TE, wanted)),
        plain,
        SCORES,
        rtol=1e-6,
        atol=1e-7,
    )


def test_following_the_balance_loss_balances() -> None:
    scores_TE = torch.nn.Parameter(
        torch.rand(40, 4, generator=torch.Generator().manual_seed(0)) + torch.eye(4)[0]
    )
    optimizer = torch.optim.SGD([scores_TE], lr=4.0)
    counts = []
    for _ in range(60):
        chosen_T = scores_TE.argmax(1)
        counts.append(torch.bincount(chosen_T, minlength=4))
        routing = routing_of(scores_TE, chosen_T[:, None].tolist())
        optimizer.zero_grad()
        loss_of("stable_balance", routing).backward()
        optimizer.step()
    assert counts[0].max() > 25 and counts[-1].max() <= 16


def with_light_router(scores_TE: Tensor, phase_1: float, light_TE: Tensor) -> Routing:
    routing = routing_of(scores_TE, [[0]] * len(scores_TE), phase_1)
    routing.extras["light_TE"] = light_TE
    return routing


def test_distillation_is_the_cross_entropy_of_the_choice() -> None:
    light_TE = torch.tensor([[0.3, -0.4, 2.0], [1.0, 1.0, 1.0], [0.0, 0.5, -1.0], [4.0, 0.0, 1.0]]).double()
    scores_TE = SCORES.clone().requires_grad_()

    def ours(light_TE: Tensor, phase_1: float = 1.0) -> Tensor:
        return loss_of("stable_distillation", with_light_router(scores_TE, phase_1, light_TE))

    def plain(light_TE: Tensor) -> Tensor:
        logs = [light_TE[t, e] - light_TE[t].exp().sum().log() for t, e in enumerate([0, 0, 0, 2])]
        return -torch.stack(logs).sum() / 4

    assert_alike(ours, plain, light_TE)
    given_TE = light_TE.requires_grad_()
    ours(given_TE, phase_1=0.0).backward()
    assert not gradient_of(given_TE).any() and scores_TE.grad is None


def test_distillation_follows_the_choice_among_the_candidates() -> None:
    light_TE = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    routing = with_light_router(SCORES, 1.0, light_TE)
    routing.ranking_TE = routing.ranking_TE.masked_fill(torch.tensor([True, False, False]), -torch.inf)
    loss_of("stable_distillation", routing).backward()
    assert gradient_of(light_TE).argmin(1).tolist() == [1, 1, 2, 2]
