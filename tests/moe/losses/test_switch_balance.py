"""Auxiliary losses: hand-worked numbers, and gradients of an independent fp64 formula."""

import math

import pytest
import torch

from tests.moe.build import make_part, make_routing

PROBS = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.1, 0.4]])
WANTED = [[0, 1], [0, 2]]  # f = 1/2, 1/4, 1/4; of first choices alone: 1, 0, 0


def test_switch_balance_is_1_at_perfect_balance() -> None:
    routing = make_routing([[0, 1], [2, 3], [1, 0], [3, 2]], torch.zeros(4, 4), torch.full((4, 4), 0.25))
    for first_choice in (False, True):
        loss = make_part("loss", "switch_balance", first_choice=first_choice)
        assert loss(routing).item() == pytest.approx(1)


def test_switch_balance_is_the_number_of_experts_when_one_takes_all() -> None:
    probs_TE = torch.tensor([[1.0, 0, 0, 0]] * 3)
    assert make_part("loss", "switch_balance")(make_routing([[0]] * 3, probs_TE, probs_TE)).item() == 4


@pytest.mark.parametrize(("first_choice", "expected"), [(False, 1.2), (True, 1.8)])
def test_switch_balance_by_hand(first_choice: bool, expected: float) -> None:
    # P = 0.6, 0.15, 0.25: 3 (0.6/2 + 0.15/4 + 0.25/4) = 1.2 and 3 x 0.6 = 1.8
    loss = make_part("loss", "switch_balance", num_experts=3, first_choice=first_choice)
    assert loss(make_routing(WANTED, PROBS.log(), PROBS)).item() == pytest.approx(expected)


def test_switch_balance_counts_what_was_wanted_not_what_was_left() -> None:
    routing = make_routing(WANTED, PROBS.log(), PROBS)
    routing.pairs = routing.wanted.keep(torch.tensor([True, False, False, False]))
    assert make_part("loss", "switch_balance", num_experts=3)(routing).item() == pytest.approx(1.2)


def test_switch_balance_sends_its_gradient_through_the_values_alone() -> None:
    scores_TE = PROBS.log().double().requires_grad_()
    probs_TE = scores_TE.softmax(1)
    make_part("loss", "switch_balance", num_experts=3)(make_routing(WANTED, scores_TE, probs_TE)).backward()
    # d/ds of 3 sum_i f_i mean_t p_ti is 3/2 p (f - f.p) for each of the two tokens.
    f_E, p_TE = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64), PROBS.double()
    torch.testing.assert_close(scores_TE.grad, 1.5 * p_TE * (f_E - p_TE @ f_E[:, None]))


def test_z_loss_by_hand() -> None:
    scores_TE = torch.tensor([[math.log(1), math.log(3)], [math.log(0.5), math.log(0.5)]])
    loss = make_part("loss", "z_loss", num_experts=2)(make_routing([[0], [1]], scores_TE, scores_TE))
    assert loss.item() == pytest.approx(math.log(4) ** 2 / 2)  # log 4 and log 1


def test_gradient_of_z_loss() -> None:
    scores_TE = torch.tensor([[0.3, -1.0, 2.0], [4.0, 0.1, -0.5]], dtype=torch.float64, requires_grad=True)
    make_part("loss", "z_loss", num_experts=3)(make_routing(WANTED, scores_TE, scores_TE)).backward()
    plain_TE = scores_TE.detach()
    z_T1 = plain_TE.exp().sum(1, keepdim=True)
    torch.testing.assert_close(scores_TE.grad, plain_TE.exp() / z_T1 * z_T1.log())  # 2/T = 1


@pytest.mark.parametrize("name", ["switch_balance", "z_loss"])
def test_without_tokens_a_loss_is_0(name: str) -> None:
    assert make_part("loss", name)(make_routing([], torch.zeros(0, 4), torch.zeros(0, 4))).item() == 0
