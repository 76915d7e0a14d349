"""gating: by hand over three layers, its gradients by formula, what goes from layer to layer, refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.config import parse_config
from megamoe.config.layer_kinds import scores_before
from megamoe.moe.layer import LayerShape, MoELayer
from megamoe.moe.part import StepContext
from megamoe.moe.recompute import recomputed
from tests.support.moe.build import FFN, HIDDEN, make_hidden, make_part, moe_config

EXPERTS = 4


def chain(context: StepContext, layers: int = 3, **router: Any) -> list[MoELayer]:
    """MoE layers in a row, each of which reads the scores of the one before."""
    config = moe_config(num_experts=EXPERTS, router={"residual": "gating", **router}, losses={"z_loss": 0.1})
    found = []
    for number in range(1, layers + 1):
        shape = LayerShape(
            HIDDEN, FFN, number, "swiglu", 0.4, 0.4, seed=number, before=number - 1 if number > 1 else None
        )
        found.append(MoELayer(config, shape, context))
    return found


def through(layers: list[MoELayer], hidden_TH: Tensor) -> Tensor:
    for layer in layers:
        hidden_TH = hidden_TH + layer(hidden_TH)
    return hidden_TH


def test_by_hand() -> None:
    """W_g = ((1, 2), (0, 1)), before (3, 1): (5, 1) are added to (1, -1)."""
    part = make_part("residual", "gating", 2)
    part.weight.data.copy_(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    scores_TE, before_TE = torch.tensor([[1.0, -1.0]]), torch.tensor([[3.0, 1.0]])
    assert part(scores_TE, before_TE, StepContext()).tolist() == [[6.0, 0.0]]
    assert part(scores_TE, None, StepContext()).tolist() == [[1.0, -1.0]]


def test_scores_and_gradients_of_a_chain_are_the_formula() -> None:
    """G_j = W_j x_j + W_g G_(j-1), in fp64; the gradient reaches the routers before."""
    context = StepContext()
    layers, seen = chain(context), []
    for layer in layers:
        layer.router.register_forward_hook(
            lambda module, inputs, routing: seen.append((inputs[0], routing.scores_TE))
        )
    through(layers, make_hidden(6))
    wanted_TE = None
    weights = [
        tuple(layer.router.get_parameter(name) for name in ("scorer.weight", "residual.weight"))
        for layer in layers
    ]
    copies = [tuple(weight.detach().double().requires_grad_() for weight in pair) for pair in weights]
    for (hidden_TH, scores_TE), (scorer, residual) in zip(seen, copies, strict=True):
        own_TE = hidden_TH.detach().double() @ scorer.T
        wanted_TE = own_TE if wanted_TE is None else own_TE + wanted_TE @ residual.T
        torch.testing.assert_close(scores_TE.double(), wanted_TE, rtol=1e-5, atol=1e-6)
    assert wanted_TE is not None
    # The last scores alone, by tokens that are given: what comes back through the residuals.
    given = [hidden_TH.detach() for hidden_TH, _ in seen]
    last_TE = None
    for layer, hidden_TH in zip(layers, given, strict=True):
        last_TE = layer.router(hidden_TH, context, last_TE).scores_TE
    assert last_TE is not None
    last_TE.square().sum().backward()
    wanted_TE.square().sum().backward()
    for pair, copied in zip(weights, copies, strict=True):
        for weight, copy in zip(pair, copied, strict=True):
            assert weight.grad is not None
            expected = torch.zeros_like(copy) if copy.grad is None else copy.grad
            torch.testing.assert_close(weight.grad.double(), expected, rtol=1e-4, atol=1e-5)


def test_recomputed_layers_read_the_same_scores() -> None:
    """To the bit; what a layer hands on stays that of its first pass."""
    found = []
    for again in (False, True):
        context = StepContext()
        layers = chain(context, scorer={"name": "linear", "jitter": 0.2})
        hidden_TH = make_hidden(8).requires_grad_()
        state_TH = hidden_TH
        for layer in layers:
            state_TH = state_TH + (recomputed(layer, [layer], state_TH) if again else layer(state_TH))
        handed = {number: trace.scores_TE for number, trace in context.batch.traces.items()}
        state_TH.square().sum().backward()
        again_TE = {number: trace.scores_TE for number, trace in context.batch.traces.items()}
        assert sorted(handed) == [1, 2, 3] and all(again_TE[n] is handed[n] for n in handed)
        gradients = [weight.grad for layer in layers for weight in layer.parameters()]
        found.append([hidden_TH.grad, *gradients])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True) if one is not None)
    assert [one is None for one in found[0]] == [other is None for other in found[1]]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([], {2: 1, 3: 2, 4: 3, 5: 4}),
        ([{"layers": [2, 4], "num_experts": 16}], {3: 1, 4: 2, 5: 3}),
        ([{"layers": [2], "zero_experts": {"identity": 8}, "num_experts": 8}], {3: 1, 4: 3, 5: 4}),
        ([{"layers": [3], "router": "hash"}], {2: 1, 4: 2, 5: 4}),
    ],
    ids=["one kind", "two chains", "more to choose among", "a layer without"],
)
def test_which_layer_is_before(groups: list[dict[str, Any]], expected: dict[int, int]) -> None:
    tree: dict[str, Any] = {
        "model": {"num_layers": 5},
        "moe": {"layers": {"every": 1}, "num_experts": 4, "router": {"residual": "gating"}, "groups": groups},
    }
    assert scores_before(parse_config(tree)) == expected


def test_each_stack_of_an_encoder_decoder_begins_anew_and_multi_token_prediction_goes_on() -> None:
    moe = {"layers": {"encoder": {"every": 1}, "decoder": {"every": 1}}, "router": {"residual": "gating"}}
    model = {"num_layers": 2, "architecture": "encoder_decoder", "predicts": "translation"}
    model.pop("predicts")
    assert scores_before(parse_config({"model": model, "moe": moe})) == {2: 1, 4: 3}
    decoder = {"num_layers": 2, "multi_token_prediction": {"depth": 2}}
    tree = {"model": decoder, "moe": {"layers": {"every": 1}, "router": {"residual": "gating"}}}
    assert scores_before(parse_config(tree)) == {2: 1, 3: 2, 4: 3}
    assert scores_before(parse_config({"model": decoder, "moe": {"layers": {"every": 1}}})) == {}
