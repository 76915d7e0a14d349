"""The z-loss: by hand, and its gradient by formula."""

import math

import pytest
import torch
from torch import Tensor

from tests.support.moe.build import assert_alike, loss_of, make_routing


def z_loss(scores_TE: Tensor) -> Tensor:
    return loss_of("z_loss", make_routing([[0]] * len(scores_TE), scores_TE, scores_TE))


def test_z_loss_by_hand() -> None:
    scores_TE = torch.tensor([[math.log(1), math.log(3)], [math.log(0.5), math.log(0.5)]])
    assert z_loss(scores_TE).item() == pytest.approx(math.log(4) ** 2 / 2)  # log 4 and log 1


def test_value_and_gradient_of_equation_5() -> None:
    scores_TE = torch.tensor([[0.3, -1.0, 2.0], [4.0, 0.1, -0.5]], dtype=torch.float64)
    assert_alike(z_loss, lambda s_TE: s_TE.exp().sum(1).log().square().mean(), scores_TE)
