"""The z-loss: by hand, and its gradient by formula."""

import math

import pytest
import torch

from megamoe.moe.part import StepContext
from tests.moe.build import make_part, make_routing


def test_z_loss_by_hand() -> None:
    scores_TE = torch.tensor([[math.log(1), math.log(3)], [math.log(0.5), math.log(0.5)]])
    loss = make_part("loss", "z_loss", num_experts=2)(
        make_routing([[0], [1]], scores_TE, scores_TE), StepContext()
    )
    assert loss.item() == pytest.approx(math.log(4) ** 2 / 2)  # log 4 and log 1


def test_gradient_of_z_loss() -> None:
    scores_TE = torch.tensor([[0.3, -1.0, 2.0], [4.0, 0.1, -0.5]], dtype=torch.float64, requires_grad=True)
    make_part("loss", "z_loss", num_experts=3)(
        make_routing([[0, 1], [0, 2]], scores_TE, scores_TE), StepContext()
    ).backward()
    plain_TE = scores_TE.detach()
    z_T1 = plain_TE.exp().sum(1, keepdim=True)
    torch.testing.assert_close(scores_TE.grad, plain_TE.exp() / z_T1 * z_T1.log())  # 2/T = 1
