"""Mistakes in a plugin's parts are one line with the part's name; right results are what they were."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.moe import guarded
from megamoe.moe.layer import MoELayer
from megamoe.moe.recompute import recomputed
from megamoe.moe.routing import Pairs
from megamoe.registry import load_plugin
from megamoe.train.step_sums import part_metrics
from tests.support.moe.build import make_hidden, make_layer, moe_config
from tests.support.refusals import Case, cases, told

EXPERTS, TOKENS = 8, 16
PLUGIN = """
from dataclasses import dataclass
import torch
from megamoe.kernels.router import largest
from megamoe.moe.part import Mask, Part, Residual, ScoreFunction, Selector
from megamoe.moe.routing import Pairs, CapacitySlots
from megamoe.registry import register

@register("scorer", "own_scorer")
class Scorer(Part):
    def __init__(self, config, dims):
        super().__init__(config, dims)
        self.weight = torch.nn.Parameter(torch.empty(dims.num_experts, dims.hidden_size))
        dims.init_weight(self.weight, "own")
    def forward(self, hidden_TH, context):
        scores_TE = hidden_TH @ self.weight.float().T
        {scorer}

@register("residual", "own_residual")
class Own(Residual):
    def forward(self, scores_TE, before_TE, context):
        {residual}

@register("mask", "own_mask")
class OwnMask(Mask):
    def forward(self, scored, context):
        right_TE = scored.scores_TE > scored.scores_TE.amin(1, keepdim=True)
        {mask}

@register("score_function", "own_function")
class Function(ScoreFunction):
    def forward(self, scores_TE, candidates_TE):
        {score_function}

@register("selector", "own_selector")
class Choice(Selector):
    def forward(self, scored, context):
        expert_TK = largest(scored.ranking_TE, 2)
        weight_TK = scored.probs_TE.gather(1, expert_TK)
        {selector}

@register("capacity", "own_capacity")
class Capacity(Part):
    def forward(self, pairs, scored, context):
        {capacity}

@register("loss", "own_loss")
class Loss(Part):
    @dataclass
    class Config:
        weight: float = 0.1
    def forward(self, routing, context):
        p = routing.probs_TE
        {loss}
    {method}
"""
RIGHT = {
    "scorer": "return scores_TE, {'mean_T': scores_TE.mean(1)}",
    "residual": "return scores_TE",
    "mask": "return right_TE",
    "score_function": "return scores_TE.sigmoid()",
    "selector": "return Pairs.of_choices(expert_TK, weight_TK, weight_TK > 0.3)",
    "capacity": "return pairs.weight_N > 0.4",
    "loss": "return p.square().mean()",
    "method": "",
}


@pytest.fixture
def make(own_registry: None, tmp_path: Path) -> Callable[..., MoELayer]:
    """Build a layer whose parts are all those of PLUGIN, with these bodies of methods."""

    def made(**bodies: str) -> MoELayer:
        (tmp_path / "mine.py").write_text(PLUGIN.format(**(RIGHT | bodies)))
        load_plugin(str(tmp_path / "mine.py"))
        stages = ("scorer", "residual", "selector", "capacity")
        router: dict[str, Any] = {stage: f"own_{stage}" for stage in stages}
        router |= {"masks": ["own_mask"], "score_function": "own_function"}
        return make_layer(moe_config(num_experts=EXPERTS, router=router, losses={"own_loss": 0.1}))

    return made


class Model:
    """A model of one layer, as far as the metrics of its parts need it."""

    def __init__(self, layer: MoELayer) -> None:
        self.layer = layer

    def moe_layers(self) -> list[tuple[int, MoELayer]]:
        return [(1, self.layer)]


@pytest.mark.parametrize("case", cases("own_parts"))
def test_a_mistake_is_one_line(
    make: Callable[..., MoELayer], case: Case, expect_message: Callable[..., None], tmp_path: Path
) -> None:
    def use() -> None:
        layer = make(**{case["where"]: case["body"]})
        layer(make_hidden(TOKENS))
        part_metrics(Model(layer))
        layer.after_step(torch.ones(EXPERTS, dtype=torch.int64))
        for parameter, projection in layer.constraints():
            projection(parameter.detach())

    expect_message(case, told(use, tmp_path))


def gradients(layer: MoELayer, again: bool) -> dict[str, Tensor]:
    """Return the output and all gradients of a pass, which is computed again in backward or not."""
    layer.zero_grad()
    hidden_TH = make_hidden(TOKENS).requires_grad_()
    output_TH = recomputed(layer, [layer], hidden_TH) if again else layer(hidden_TH)
    output_TH.square().sum().backward()
    found = {
        name: weight.grad.clone() for name, weight in layer.named_parameters() if weight.grad is not None
    }
    return {"output": output_TH.detach(), **found}


@pytest.mark.parametrize("again", [False, True])
def test_right_results_are_those_without_checks(make: Callable[..., MoELayer], again: bool) -> None:
    """PyTorch ends a recomputation by an exception in the middle of a part, which is no mistake of it."""
    layer = make()
    found = gradients(layer, again)
    for part in layer.modules():
        for method in guarded.METHODS:
            vars(part).pop(method, None)
    expected = gradients(layer, again=False)
    assert found.keys() == expected.keys() and "router.scorer.weight" in found
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("body", ["return p.new_zeros(())", "return p.mean()"])
def test_a_loss_may_lack_a_gradient(make: Callable[..., MoELayer], body: str) -> None:
    """A loss that is switched on later is a constant 0 at first; in evaluation no loss has a gradient."""
    layer = make(loss=body)
    with torch.no_grad():
        layer(make_hidden(TOKENS))
    layer(make_hidden(TOKENS))


def test_a_loss_of_a_frozen_router_lacks_a_gradient(make: Callable[..., MoELayer]) -> None:
    layer = make(loss="return p.detach().mean()")
    layer.router.requires_grad_(False)
    layer(make_hidden(TOKENS))


def test_the_pairs_values_are_read_in_the_first_pass_alone(
    make: Callable[..., MoELayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, read = make(), []
    monkeypatch.setattr(guarded, "_check_numbers", lambda *given: read.append(given[0]))
    for _ in range(3):
        layer(make_hidden(TOKENS))
    assert read == [layer.router.selector]


@pytest.mark.parametrize("size", [(3,), (3, 2, 1)])
def test_choices_are_a_table(size: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expert_TK is \[3.*\], expected \[tokens, choices\]"):
        Pairs.of_choices(torch.zeros(size, dtype=torch.int64), torch.ones(size))
