"""StableMoE's distillation: the cross-entropy of the light router, and nobody else learns from it."""

import torch
from torch import Tensor

from megamoe.moe.routing import Routing
from tests.support.moe.build import assert_alike, gradient_of, loss_of, make_routing

SCORES = torch.tensor(
    [[1.0, 0.0, -1.0], [2.0, 1.0, 0.0], [0.5, -2.0, 0.0], [0.0, 0.0, 1.5]], dtype=torch.float64
)


def routing_of(scores_TE: Tensor, phase_1: float, light_TE: Tensor) -> Routing:
    routing = make_routing([[0]] * len(scores_TE), scores_TE, scores_TE.sigmoid())
    routing.extras |= {"phase_1": torch.tensor(phase_1), "light_TE": light_TE}
    return routing


def test_distillation_is_the_cross_entropy_of_the_choice() -> None:
    light_TE = torch.tensor([[0.3, -0.4, 2.0], [1.0, 1.0, 1.0], [0.0, 0.5, -1.0], [4.0, 0.0, 1.0]]).double()
    scores_TE = SCORES.clone().requires_grad_()

    def ours(light_TE: Tensor, phase_1: float = 1.0) -> Tensor:
        return loss_of("stable_distillation", routing_of(scores_TE, phase_1, light_TE))

    def plain(light_TE: Tensor) -> Tensor:
        logs = [light_TE[t, e] - light_TE[t].exp().sum().log() for t, e in enumerate([0, 0, 0, 2])]
        return -torch.stack(logs).sum() / 4

    assert_alike(ours, plain, light_TE)
    given_TE = light_TE.requires_grad_()
    ours(given_TE, phase_1=0.0).backward()
    assert not gradient_of(given_TE).any() and scores_TE.grad is None


def test_distillation_follows_the_choice_among_the_candidates() -> None:
    light_TE = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    routing = routing_of(SCORES, 1.0, light_TE)
    routing.ranking_TE = routing.ranking_TE.masked_fill(torch.tensor([True, False, False]), -torch.inf)
    loss_of("stable_distillation", routing).backward()
    assert gradient_of(light_TE).argmin(1).tolist() == [1, 1, 2, 2]
