"""Mistakes in a plugin's parts are one line with the part's name; right results are what they were."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.errors import UserError
from megamoe.moe import guarded
from megamoe.moe.layer import MoELayer
from megamoe.moe.recompute import recomputed
from megamoe.moe.routing import Pairs
from megamoe.registry import load_plugin
from megamoe.train.step_sums import part_metrics
from tests.support.moe.build import make_hidden, make_layer, moe_config

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
SCORES = f"expected float32 [{TOKENS}, {EXPERTS}] (tokens, experts)"
MISTAKES = [
    (
        "scorer",
        "return scores_TE[:, :4]",
        f"own_scorer' (mine.py): forward returned float32 [16, 4], {SCORES}",
    ),
    ("scorer", "return scores_TE.T", f"own_scorer' (mine.py): forward returned float32 [8, 16], {SCORES}"),
    ("scorer", "pass", f"own_scorer' (mine.py): forward returned None, {SCORES}"),
    ("scorer", "return scores_TE.tolist()", f"own_scorer' (mine.py): forward returned a list, {SCORES}"),
    ("scorer", "return scores_TE.bfloat16()", f"forward returned bfloat16 [16, 8], {SCORES}"),
    ("scorer", "return scores_TE, {}, 1", f"forward returned a tuple of 3, {SCORES}"),
    (
        "scorer",
        "return scores_TE, 1",
        "returned an int beside the scores, expected a dict of tensors by name",
    ),
    (
        "scorer",
        "return scores_TE, {'a_T': 3}",
        "forward returned an int as the extra 'a_T', expected a tensor",
    ),
    (
        "scorer",
        "return scores_TE, {'a_T': scores_TE[0]}",
        "forward returned float32 [8] as the extra 'a_T', expected a row for each of 16 tokens",
    ),
    (
        "scorer",
        "return self.no_such",
        "scorer 'own_scorer': forward failed at line 17 of mine.py: AttributeErr",
    ),
    (
        "residual",
        "return scores_TE[0]",
        f"residual 'own_residual' (mine.py): forward returned float32 [8], {SCORES}",
    ),
    (
        "mask",
        "return right_TE.float()",
        f"mask 'own_mask' (mine.py): forward returned float32 [16, 8], {SCORES.replace('float32', 'bool')}",
    ),
    (
        "score_function",
        "return scores_TE.sum(1)",
        f"score function 'own_function' (mine.py): forward returned float32 [16], {SCORES}",
    ),
    ("selector", "pass", "selector 'own_selector' (mine.py): forward returned None, expected Pairs, as"),
    (
        "selector",
        "return expert_TK",
        "forward returned int64 [16, 2], expected Pairs, as Pairs.of_choices makes",
    ),
    (
        "selector",
        "return Pairs.of_choices(expert_TK, weight_TK[:, :1])",
        "of mine.py: ValueError: Pairs.of_choices: weight_TK is [16, 1], expected [16, 2] as of expert_TK",
    ),
    (
        "selector",
        "return Pairs.of_choices(expert_TK, weight_TK, weight_TK[:, :1] > 0)",
        "of mine.py: ValueError: Pairs.of_choices: valid_TK is [16, 1], expected [16, 2] as of expert_TK",
    ),
    (
        "selector",
        "return Pairs.of_choices(expert_TK.float(), weight_TK)",
        "forward returned float32 [32] as expert_N, expected int64 [32] (pairs)",
    ),
    (
        "selector",
        "return Pairs.of_choices(expert_TK + 8, weight_TK)",
        "experts from 8 to 15, expected 0 to 7",
    ),
    (
        "selector",
        "return Pairs.of_choices(expert_TK - 8, weight_TK)",
        "experts from -8 to -1, expected 0 to 7",
    ),
    (
        "selector",
        "return Pairs.of_choices(expert_TK[:, :1].repeat(1, 2), weight_TK)",
        "returned 16 pairs a second time, expected an expert at most once for each token",
    ),
    (
        "selector",
        "return Pairs.of_choices(expert_TK[:10], weight_TK[:10])",
        "returned choices of 10 tokens, expected of 16",
    ),
    (
        "selector",
        "return Pairs.of_choices(expert_TK[:10], weight_TK[:10], weight_TK[:10] > 0)",
        "returned choices of 10 tokens, expected of 16",
    ),
    (
        "selector",
        "a = Pairs.of_choices(expert_TK, weight_TK); a.token_N = a.token_N.flip(0); return a",
        "returned pairs in another order, expected those of the first token first",
    ),
    (
        "capacity",
        "return scored",
        "capacity 'own_capacity' (mine.py): forward returned a Scored, expected bool [",
    ),
    (
        "capacity",
        "return CapacitySlots(pairs.token_N[:1], 4)",
        "returned int64 [1] as place_N, expected int64 [",
    ),
    (
        "loss",
        "return float(p.detach().mean())",
        "own_loss' (mine.py): forward returned a float, expected float32 []",
    ),
    ("loss", "pass", "loss 'own_loss' (mine.py): forward returned None, expected float32 [] (a scalar)"),
    ("loss", "return p.mean(), 1", "forward returned a tuple of 2, expected float32 [] (a scalar)"),
    ("loss", "return p.mean(0)", "forward returned float32 [8], expected float32 [] (a scalar)"),
    ("loss", "return p.mean().reshape(1)", "forward returned float32 [1], expected float32 [] (a scalar)"),
    (
        "loss",
        "return routing.wanted_counts_E().float().var()",
        "loss 'own_loss' (mine.py): forward returned a value without gradient, which changes nothing, expect",
    ),
    ("loss", "return p.detach().mean()", "forward returned a value without gradient, which changes nothing"),
    (
        "method",
        "def forward(self, routing): pass",
        "loss 'own_loss' (mine.py): forward failed: TypeError: Loss.f",
    ),
    (
        "method",
        "def metrics(self): return [1]",
        "metrics returned a list, expected a dict of scalar tensors by",
    ),
    (
        "method",
        "def metrics(self): return {'a': 1.0}",
        "metrics returned a float as 'a', expected a tensor of shape",
    ),
    (
        "method",
        "def metrics(self): return {'a': torch.ones(3)}",
        "metrics returned float32 [3] as 'a', expected a",
    ),
    (
        "method",
        "def metrics(self): return {'a': self.b}",
        "loss 'own_loss': metrics failed at line 55 of mine.py: A",
    ),
    (
        "method",
        "def after_step(self, load_E): pass",
        "(mine.py): after_step failed: TypeError: Loss.after_step() ta",
    ),
    (
        "method",
        "def after_step(self, load_E, context): 1 / 0",
        "after_step failed at line 55 of mine.py: ZeroDivis",
    ),
    (
        "method",
        "def constraints(self): return 3",
        "constraints returned an int, expected a list of (parameter, fun",
    ),
    (
        "method",
        "def constraints(self): return [1]",
        "constraints returned an int in its list, expected a list of (",
    ),
    (
        "method",
        "def constraints(self): return [(torch.nn.Parameter(torch.ones(2)), lambda weight: weight[0])]",
        "loss 'own_loss' (mine.py): a projection returned float32 [], expected float32 [2]",
    ),
    (
        "method",
        "def __init__(self, config, dims): self.w = 1",
        "loss 'own_loss' (mine.py): its __init__ does not call super().__init__(config, dims); call it first",
    ),
]


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


@pytest.mark.parametrize(("where", "body", "line"), MISTAKES, ids=lambda value: value[:60])
def test_a_mistake_is_one_line(make: Callable[..., MoELayer], where: str, body: str, line: str) -> None:
    with pytest.raises(UserError, match=re.escape(line)) as refused:
        layer = make(**{where: body})
        layer(make_hidden(TOKENS))
        part_metrics(Model(layer))
        layer.after_step(torch.ones(EXPERTS, dtype=torch.int64))
        for parameter, projection in layer.constraints():
            projection(parameter.detach())
    assert "\n" not in str(refused.value) and "mine.py" in str(refused.value)


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
