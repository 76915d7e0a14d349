"""Experts without computation: their outputs, who counts them, and what does not go with them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.config.layer_kinds import kinds, routed_by_layer
from megamoe.model.size import model_size
from megamoe.moe.part import StepContext
from megamoe.moe.router import mean_choices
from tests.support.moe.build import (
    HIDDEN,
    loss_of,
    make_hidden,
    make_layer,
    make_part,
    make_routing,
    moe_config,
    observed,
)
from tests.support.moe.plain import loop_experts
from tests.support.tiny import VOCABULARY, tiny

E, Z, K, TOKENS = 4, 5, 3, 40
KINDS = {"identity": 2, "zero": 1, "constant": 2}
RAW = {"selector": {"name": "top_k", "k": K, "weights": "raw"}}


def built(**tree: Any) -> Any:
    """Return a layer of E experts that compute."""
    return make_layer(moe_config(num_experts=E, **tree))


def plain(layer: Any, hidden_TH: Tensor) -> Tensor:
    """Every token by itself, expert by expert; softmax and top-k written out."""
    prob_TE = (hidden_TH @ layer.router.scorer.weight.T).softmax(-1)
    rows = []
    for hidden_H, prob_E in zip(hidden_TH, prob_TE, strict=True):
        row_H = torch.zeros(HIDDEN)
        for expert in prob_E.topk(K).indices.tolist():
            if expert < E:
                counts_E = torch.eye(E, dtype=torch.int64)[expert]
                output_H = loop_experts(layer.experts, hidden_H[None], counts_E)[0]
            elif expert < E + 2:
                output_H = hidden_H
            elif expert == E + 2:
                output_H = torch.zeros(HIDDEN)
            else:
                number = expert - E - 3
                a, b = (layer.zero.mix[number] @ hidden_H).softmax(0)
                output_H = a * hidden_H + b * layer.zero.vector[number]
            row_H = row_H + prob_E[expert] * output_H
        rows.append(row_H)
    return torch.stack(rows)


def test_output_and_gradients_are_those_of_a_loop() -> None:
    layer = built(zero_experts=KINDS, router=RAW)
    assert layer.experts.up.shape[0] == E and layer.router.scorer.weight.shape[0] == E + Z
    found: list[list[Tensor]] = []
    for function in (layer, lambda hidden_TH: plain(layer, hidden_TH)):
        hidden_TH = make_hidden(TOKENS).requires_grad_()
        output_TH = function(hidden_TH)
        leaves = [hidden_TH, *layer.parameters()]
        found.append(
            [output_TH.detach(), *torch.autograd.grad((output_TH * make_hidden(TOKENS, 5)).sum(), leaves)]
        )
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert all(gradient.abs().max() > 1e-4 for gradient in found[1][1:])


def test_only_experts_that_compute_are_counted_and_get_rows() -> None:
    layer = built(zero_experts=KINDS, router=RAW)
    rows: list[int] = []
    layer.experts.register_forward_hook(lambda module, given, output: rows.append(len(given[0])))
    hidden_TH = make_hidden(TOKENS)
    layer(hidden_TH)
    chosen_TK = (hidden_TH @ layer.router.scorer.weight.T).topk(K).indices
    count_A = torch.bincount(chosen_TK.flatten(), minlength=E + Z)
    seen = observed(layer)
    assert seen.load_E.tolist() == count_A[:E].tolist() and seen.wanted_E.tolist() == count_A.tolist()
    width_D = torch.bincount((chosen_TK < E).sum(1), minlength=E + Z + 1)
    assert seen.width_D.tolist() == width_D.tolist()
    assert rows == [int(count_A[:E].sum())]
    assert 0 < rows[0] < K * TOKENS


def test_identity_experts_stay_in_the_hidden_space_beside_latent_ones() -> None:
    """All tokens choose identity experts alone: the output is the token times the sum of their weights."""
    router = {"selector": {"name": "top_k", "k": 2, "weights": "renormalised", "scale": 2.0}}
    layer = built(zero_experts={"identity": 2}, latent_size=8, router=router)
    with torch.no_grad():
        layer.router.scorer.weight.zero_()
        layer.router.scorer.weight[E:, 0] = 10.0
    hidden_TH = make_hidden(TOKENS, skewed=True)
    torch.testing.assert_close(layer(hidden_TH), 2 * hidden_TH)
    assert observed(layer).load_E.tolist() == [0] * E


def test_the_bias_holds_the_mean_number_of_experts_that_compute() -> None:
    """b_i += u (K_e / (K E) - n_i / sum n): with K_e 1.5 of 3 and 4 experts the share is 1/8."""
    options: dict[str, Any] = {"bias_update": 0.8, "mean_experts": 1.5}
    part = make_part("score_function", "softmax", E + 2, dims={"num_zero": 2, "num_choices": 3}, **options)
    part.after_step(torch.tensor([10, 0, 5, 5, 10, 10]), StepContext())
    assert part.bias_E.tolist() == pytest.approx([-0.1, 0.1, 0.0, 0.0, 0.0, 0.0], abs=1e-7)


def test_the_held_mean_is_reached() -> None:
    """From a router that sends all tokens to the experts without computation."""
    held = {"name": "softmax", "over": "all", "bias_update": 0.05, "mean_experts": 1.5}
    tree = {"score_function": held, "selector": {"name": "top_k", "k": 3, "weights": "raw"}}
    layer = built(zero_experts={"identity": 4}, router=tree)
    with torch.no_grad():
        layer.router.scorer.weight.mul_(0.3)
        layer.router.scorer.weight[E:, 0] += 0.3
    hidden_TH, means = make_hidden(200, skewed=True), []
    for _ in range(300):
        layer(hidden_TH)
        seen = observed(layer)
        means.append(float(seen.load_E.sum()) / len(hidden_TH))
        layer.after_step(seen.wanted_E)
    assert means[0] < 0.5
    assert sum(means[-50:]) / 50 == pytest.approx(1.5, abs=0.1)


def test_the_loss_of_both_kinds_by_hand() -> None:
    """Two experts and one without computation; f = (1, 1/2, 1/2), P = (0.3, 0.4, 0.3), tau 0.5."""
    probs_TE = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.3, 0.3]])
    routing = make_routing([[0, 1], [0, 2]], probs_TE.log(), probs_TE)
    found = float(loss_of("heterogeneous_balance", routing, dims={"num_zero": 1}, tau=0.5))
    assert found == pytest.approx(0.3 + 0.5 * 0.4 + 0.5 * 0.5 * 0.3)
    # Of a sigmoid it takes each token's shares: smaller p lower nothing.
    small = make_routing([[0, 1], [0, 2]], probs_TE.log(), probs_TE * torch.tensor([[0.1], [0.5]]))
    sigmoid = {"num_zero": 1, "score_function": frozenset({"elementwise"})}
    assert float(loss_of("heterogeneous_balance", small, dims=sigmoid, tau=0.5)) == pytest.approx(found)


def test_the_capacity_of_both_kinds_by_hand() -> None:
    """MoE++: gamma tau k T / (tau E + Z) and gamma k T / (tau E + Z), rounded up."""
    part = make_part(
        "capacity", "per_expert", 6, dims={"num_zero": 2, "num_choices": 2}, factor=1.1, tau=0.75
    )
    assert part.slots(10).tolist() == [4] * 4 + [5] * 2  # 1.1 * 20 / 5 = 4.4, and three quarters of it
    layer = make_layer(
        moe_config(
            num_experts=E,
            zero_experts=KINDS,
            router={**RAW, "capacity": {"name": "per_expert", "factor": 0.5, "tau": 0.75}},
        )
    )
    layer(make_hidden(TOKENS))
    most = math.ceil(0.5 * 0.75 * K * TOKENS / (0.75 * E + Z))
    assert observed(layer).load_E.max() == most < observed(layer).wanted_E[:E].max()


def test_a_group_of_layers_has_them() -> None:
    """Top-2 of 8 and 4 identity experts in the second block: two thirds of two experts compute a token."""
    config = tiny(
        "moe.groups=[{layers: [2], num_experts: 8, zero_experts: {identity: 4}, "
        "router: {selector: {name: top_k, k: 2}}}]"
    )
    first, second = kinds(config)
    assert first.moe.zero_experts.total == 0 and second.moe.zero_experts.identity == 4
    assert routed_by_layer(config) == [4, 12]
    assert mean_choices(second.moe) == pytest.approx(4 / 3)
    expert = 3 * 16 * 12
    size = model_size(config, VOCABULARY)
    assert size.total - size.active == 2 * expert + 8 * expert - round(4 / 3 * expert)
