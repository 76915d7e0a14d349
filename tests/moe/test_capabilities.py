"""A plugin's parts are judged by what they declare, as the built-in ones are."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.errors import UserError
from megamoe.moe.part import Candidates, Mask, Part, StepContext
from megamoe.moe.routing import Scored
from megamoe.moe.validation import check_parts
from megamoe.registry import register
from tests.support.moe.build import make_hidden, make_layer, moe_config

ONE: dict[str, Any] = {"k": 1, "weights": "raw"}


@pytest.fixture
def twins(own_registry: None) -> None:
    """A mask that leaves one expert, and a scorer with noise: none of them derived from a built-in part."""

    @register("mask", "own_best")
    class OwnBest(Mask):
        @classmethod
        def num_candidates(cls, options: Any, num_experts: int, expert_parallel: int = 1) -> Candidates:
            return Candidates(num_experts, each=(1, 1))

        def forward(self, scored: Scored, context: StepContext) -> Tensor:
            best_T1 = scored.ranking_TE.argmax(dim=-1, keepdim=True)
            return torch.zeros_like(scored.ranking_TE, dtype=torch.bool).scatter_(1, best_T1, True)

    @register("scorer", "own_noise")
    class OwnNoise(Part):
        @classmethod
        def provides(cls, options: Any) -> set[str]:
            return {"clean_TE", "noise_std_TE"}

        def __init__(self, config: Any, dims: Any) -> None:
            super().__init__(config, dims)
            self.weight = torch.nn.Parameter(torch.randn(dims.num_experts, dims.hidden_size))

        def forward(self, hidden_TH: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
            clean_TE = hidden_TH @ self.weight.T
            return clean_TE, {"clean_TE": clean_TE, "noise_std_TE": torch.ones_like(clean_TE)}

    @register("mask", "own_draw")
    class OwnDraw(OwnBest):
        random = True
        step_wide = True

    @register("selector", "own_groups")
    class OwnGroups(Part):
        """A selector without the base class that it needs."""

        @dataclass
        class Config:
            groups: int = 1


def test_a_mask_that_leaves_one_expert_is_refused_like_its_twin(twins: None) -> None:
    for loss in ({}, {"clustering": {"cluster_size": 4}}):
        for mask in ("own_best", {"name": "entropy_prune", "bound": 0.0}):
            with pytest.raises(UserError, match="leaves one expert to each token, .*score_function: sigmoid"):
                check_parts(
                    moe_config(num_experts=8, router={"masks": [mask], "selector": ONE}, losses=loss), 1
                )
    router = {"masks": ["own_best"], "selector": ONE, "score_function": "sigmoid"}
    check_parts(moe_config(num_experts=8, router=router), 1)
    with pytest.raises(UserError, match="own_best leaves one expert of a cluster"):
        check_parts(moe_config(num_experts=8, router=router, losses={"clustering": {"cluster_size": 4}}), 1)
    with pytest.raises(UserError, match="sends every token to every expert that it may choose"):
        check_parts(moe_config(num_experts=8, router=router, losses={"switch_balance": {}}), 1)


def test_a_selector_needs_its_base_class(twins: None) -> None:
    message = "^moe.router.selector: own_groups: expected a subclass of megamoe.moe.part.Selector$"
    with pytest.raises(UserError, match=message):
        check_parts(moe_config(router={"selector": "own_groups"}), 1)


def test_a_random_mask_is_allowed_once(twins: None) -> None:
    router = {"masks": ["own_draw", "own_draw"], "selector": ONE, "score_function": "sigmoid"}
    with pytest.raises(UserError, match="own_draw stands twice in moe.router.masks"):
        check_parts(moe_config(num_experts=8, router=router), 1)


def test_a_scorer_that_gives_noise_goes_with_load(twins: None) -> None:
    config = moe_config(num_experts=8, router={"scorer": "own_noise"}, losses={"load": 0.1})
    check_parts(config, 1)
    layer = make_layer(config)
    (layer(make_hidden(24)) * 0).sum().backward()
    gradient = layer.router.scorer.get_parameter("weight").grad
    assert gradient is not None and gradient.any()


def test_a_capability_without_provider_is_reported(own_registry: None) -> None:
    @register("loss", "own_wish")
    class OwnWish(Part):
        @dataclass
        class Config:
            weight: float = 0.1

        @classmethod
        def requires(cls, options: Any) -> dict[str, str]:
            return {"wish_T": "which it is about"}

    with pytest.raises(
        UserError,
        match="^moe.losses.own_wish: no part gives wish_T, which it is about; leave the loss out, or name a",
    ):
        check_parts(moe_config(losses={"own_wish": 0.1}), 1)
