"""The oracle: an MoE layer written token by token, as in the papers, in fp64."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.config.schema import Activation, MoEConfig
from megamoe.moe.experts.activations import activate_plainly
from megamoe.moe.experts.grouped import GroupedExperts


@dataclass
class PlainResult:
    output_TH: Tensor
    losses: dict[str, Tensor]
    load: list[int]
    wanted: list[int]


def plain_layer(
    weights: dict[str, Tensor], hidden_TH: Tensor, config: MoEConfig, activation: Activation
) -> PlainResult:
    """Compute the layer; `weights` by the layer's parameter names; the capacity drops by position."""
    num_tokens, num_experts = len(hidden_TH), config.num_experts
    chosen = config.router.selector.options
    scores_TE = hidden_TH @ weights["router.scorer.weight"].T
    if config.router.score_function.name == "softmax":
        probs_TE = scores_TE.exp() / scores_TE.exp().sum(1, keepdim=True)
    else:
        probs_TE = 1 / (1 + (-scores_TE).exp())
    places = num_tokens
    if config.router.capacity.name == "per_expert":
        limit = config.router.capacity.options
        wanted_places = math.ceil(limit.factor * chosen.k * num_tokens / num_experts)
        places = max(wanted_places, limit.min_capacity)

    load, wanted, rows = [0] * num_experts, [0] * num_experts, []
    for token in range(num_tokens):
        row = hidden_TH.new_zeros(hidden_TH.shape[1])
        ranked = sorted(range(num_experts), key=lambda expert: -probs_TE[token, expert].item())[: chosen.k]
        for expert in ranked:
            wanted[expert] += 1
            if load[expert] < places:
                load[expert] += 1
                weight = _weight(chosen.weights, scores_TE[token], probs_TE[token], ranked, expert)
                row = row + chosen.scale * weight * plain_expert(
                    weights, expert, hidden_TH[token], activation
                )
        rows.append(_with_shared(row, weights, hidden_TH[token], activation))
    losses = {
        "switch_balance": num_experts
        * torch.stack(
            [wanted[e] / sum(wanted) * (probs_TE[:, e] / probs_TE.sum(1)).mean() for e in range(num_experts)]
        ).sum(),
        "z_loss": (scores_TE.exp().sum(1).log() ** 2).mean(),
    }
    return PlainResult(torch.stack(rows), losses, load, wanted)


def _weight(kind: str, scores_E: Tensor, probs_E: Tensor, ranked: list[int], expert: int) -> Tensor:
    if kind == "raw":
        return probs_E[expert]
    if kind == "renormalised":
        return probs_E[expert] / probs_E[ranked].sum()
    if kind == "kept_softmax":
        return scores_E[expert].exp() / scores_E[ranked].exp().sum()
    return torch.ones_like(probs_E[expert])


def plain_expert(weights: dict[str, Tensor], expert: int, token_H: Tensor, activation: Activation) -> Tensor:
    """Compute an FFN, or S(x) - x of a stack of sub-layers, each x + FFN(norm(x))."""
    if "experts.up" in weights:
        return _ffn(token_H, weights["experts.up"][expert], weights["experts.down"][expert], activation)
    x_H, place = token_H, 0
    while f"experts.sublayers.{place}.up" in weights:
        mine = {
            name.removeprefix("experts."): weight[expert]
            for name, weight in weights.items()
            if name.startswith(("experts.norms", "experts.sublayers"))
        }
        weight_H, bias_H = mine[f"norms.{place}.weight"], mine.get(f"norms.{place}.bias")
        centred_H = x_H if bias_H is None else x_H - x_H.mean()
        normed_H = weight_H * centred_H / (centred_H.square().mean() + 1e-5).sqrt()
        normed_H = normed_H if bias_H is None else normed_H + bias_H
        up, down = mine[f"sublayers.{place}.up"], mine[f"sublayers.{place}.down"]
        x_H = x_H + _ffn(normed_H, up, down, activation)
        place += 1
    return x_H - token_H


def _ffn(token_H: Tensor, up: Tensor, down: Tensor, activation: Activation) -> Tensor:
    return down @ plain_activation(up @ token_H, activation)


def plain_activation(inner: Tensor, activation: str) -> Tensor:
    """Apply the activation to [..., F], or to [..., 2F] of [gate | value] (Shazeer 2020, equation 5)."""
    gate, value = inner, torch.ones_like(inner)
    if activation.endswith(("glu", "clamped")):
        gate, value = inner.tensor_split(2, dim=-1)
    if activation in ("relu", "reglu"):
        return torch.where(gate > 0, gate, torch.zeros_like(gate)) * value
    if activation in ("gelu", "geglu"):
        return gate * (1 + torch.special.erf(gate / math.sqrt(2))) / 2 * value
    if activation == "swiglu_clamped":  # gpt-oss
        gate, value = torch.where(gate > 7, 7.0, gate), torch.where(value.abs() > 7, 7 * value.sign(), value)
        return gate / (1 + (-1.702 * gate).exp()) * (value + 1)
    assert activation == "swiglu"
    return gate / (1 + (-gate).exp()) * value


def _with_shared(
    routed_H: Tensor, weights: dict[str, Tensor], token_H: Tensor, activation: Activation
) -> Tensor:
    if "shared.up" not in weights:
        return routed_H
    shared_H = _ffn(token_H, weights["shared.up"], weights["shared.down"], activation)
    if "shared.gate" in weights:
        return routed_H + shared_H / (1 + (-(weights["shared.gate"] @ token_H)).exp())
    if "shared.mix" in weights:
        first, second = (weights["shared.mix"] @ token_H + weights["shared.mix_bias"]).exp()
        return (first * routed_H + second * shared_H) / (first + second)
    return routed_H + shared_H


def loop_experts(experts: GroupedExperts, rows_NH: Tensor, counts_E: Tensor) -> Tensor:
    """Compute `GroupedExperts.forward` by a loop over the experts."""
    outputs = []
    up_bias, down_bias = experts.up_bias, experts.down_bias
    for expert, rows in enumerate(rows_NH.split(counts_E.tolist())):
        rows = rows @ experts.up[expert].T
        rows = activate_plainly(rows if up_bias is None else rows + up_bias[expert], experts.activation)
        rows = rows @ experts.down[expert].T
        outputs.append(rows if down_bias is None else rows + down_bias[expert])
    return torch.cat(outputs)
