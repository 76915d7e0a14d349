"""The oracle: an MoE layer as one writes it on paper, token by token, in fp64."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megamoe.config.schema import MoEConfig
from megamoe.moe.experts import Activation


@dataclass
class PlainResult:
    output_TH: Tensor
    losses: dict[str, Tensor]
    load: list[int]
    wanted: list[int]


def plain_layer(
    weights: dict[str, Tensor], hidden_TH: Tensor, config: MoEConfig, activation: Activation
) -> PlainResult:
    """`weights` by the layer's parameter names; capacity drops by position."""
    num_tokens, num_experts = len(hidden_TH), config.num_experts
    chosen = config.router.selector.options
    scores_TE = hidden_TH @ weights["router.scorer.weight"].T
    if config.router.gate.name == "softmax":
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
                up, down = weights["experts.up"][expert], weights["experts.down"][expert]
                row = row + chosen.scale * weight * _ffn(hidden_TH[token], up, down, activation)
        rows.append(row + _shared(weights, hidden_TH[token], activation))
    losses = {
        "switch_balance": num_experts
        * sum(wanted[e] / sum(wanted) * probs_TE[:, e].mean() for e in range(num_experts)),
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


def _ffn(token_H: Tensor, up: Tensor, down: Tensor, activation: Activation) -> Tensor:
    inner = up @ token_H
    if activation == "gelu":
        return down @ functional.gelu(inner)
    half = len(inner) // 2
    gate, value = inner[:half], inner[half:]
    return down @ (gate / (1 + (-gate).exp()) * value)


def _shared(weights: dict[str, Tensor], token_H: Tensor, activation: Activation) -> Tensor:
    if "shared.up" not in weights:
        return torch.zeros_like(token_H)
    output = _ffn(token_H, weights["shared.up"], weights["shared.down"], activation)
    if "shared.gate" in weights:
        output = output / (1 + (-(weights["shared.gate"] @ token_H)).exp())
    return output
