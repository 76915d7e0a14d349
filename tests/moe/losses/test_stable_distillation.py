"""StableMoE's distillation: the cross-entropy of the light router, and nobody else learns from it."""

import pytest
import torch
from torch import Tensor

from megamoe.moe.part import StepContext
from megamoe.moe.routing import Routing
from tests.moe.build import make_part, make_routing

SCORES = torch.tensor(
    [[1.0, 0.0, -1.0], [2.0, 1.0, 0.0], [0.5, -2.0, 0.0], [0.0, 0.0, 1.5]], dtype=torch.float64
)


def routing_of(scores_TE: Tensor, wanted: list[list[int]], phase_1: float, light_TE: Tensor) -> Routing:
    routing = make_routing(wanted, scores_TE, scores_TE.sigmoid())
    routing.extras |= {"phase_1": torch.tensor(phase_1), "light_TE": light_TE}
    return routing


def test_distillation_is_the_cross_entropy_of_the_choice() -> None:
    light_TE = torch.tensor([[0.3, -0.4, 2.0], [1.0, 1.0, 1.0], [0.0, 0.5, -1.0], [4.0, 0.0, 1.0]]).double()
    for phase_1 in (1.0, 0.0):
        scores_TE, given_TE, plain_TE = (t.clone().requires_grad_() for t in (SCORES, light_TE, light_TE))
        routing = routing_of(scores_TE, [[0], [0], [0], [2]], phase_1, given_TE)
        loss = make_part("loss", "stable_distillation", num_experts=3)(routing, StepContext())
        chosen = [0, 0, 0, 2]
        logs = [plain_TE[t, e] - plain_TE[t].exp().sum().log() for t, e in enumerate(chosen)]
        expected = -phase_1 * torch.stack(logs).sum() / 4
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(given_TE.grad, plain_TE.grad)
        assert scores_TE.grad is None


def test_distillation_follows_the_choice_among_the_candidates() -> None:
    light_TE = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    routing = routing_of(SCORES, [[1], [1], [2], [2]], 1.0, light_TE)
    routing.ranking_TE = routing.ranking_TE.masked_fill(torch.tensor([True, False, False]), -torch.inf)
    make_part("loss", "stable_distillation", num_experts=3)(routing, StepContext()).backward()
    assert light_TE.grad is not None
    assert light_TE.grad.argmin(1).tolist() == [1, 1, 2, 2]
