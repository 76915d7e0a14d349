"""Muon on one rank, at every ZeRO stage: against a plain Muon, and torch.optim.Muon."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megamoe.config.schema import MuonConfig
from megamoe.optim.newton_schulz import step_rows
from tests.optim.test_kinds import loss_of, losses_of
from tests.support.ranks.runs import ds_config
from tests.support.tiny import tiny, tiny_engine, tiny_gpt

LR, CLIP, STEPS, DECAY = 0.01, 0.05, 10, 0.5
BASE = (f"optimizer.weight_decay={DECAY}", f"optimizer.grad_clip={CLIP}", "optimizer.eps=0.001")
SYSTEMS = {
    "gated": ("model.activation=swiglu", "moe.num_shared_experts=1", "model.num_query_groups=1"),
    "plain": ("model.activation=gelu", "model.bias=true", "model.tie_embeddings=false"),
}
VARIANTS: dict[str, tuple[str, ...]] = {
    "moonlight": (),
    "spectral": ("optimizer.muon.update_scale=spectral", "optimizer.muon.nesterov=false"),
    "polar_express": ("optimizer.muon.coefficients=polar_express", "optimizer.muon.steps=4"),
}
ADAMW_WORDS = ("embedding", "output_layer", "router", "losses", "norm", "bias")


def plain_orthogonal(matrix: Tensor, rows: list[tuple[float, float, float]]) -> Tensor:
    """In fp64, from the singular values: what the steps make of U S V^T."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / matrix.double().norm().clamp(min=1e-7)
    for a, b, c in rows:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ v


def split_by_hand(name: str, weight: Tensor, gated: bool, heads: int, groups: int) -> Iterator[Tensor]:
    """Yield views of the matrices in a weight."""
    if weight.dim() == 3:
        for expert in weight:
            yield from expert.chunk(2) if gated and name.endswith("up") else (expert,)
    elif name.endswith("qkv.weight"):
        size = weight.shape[0] // (heads + 2 * groups)
        by_group = weight.view(groups, heads // groups + 2, size, -1)
        yield by_group[:, :-2].reshape(-1, weight.shape[1])
        yield by_group[:, -2].reshape(-1, weight.shape[1])
        yield by_group[:, -1].reshape(-1, weight.shape[1])
    else:
        is_first = name.endswith(("fc1.weight", "shared.up"))
        yield from weight.chunk(2) if gated and is_first else (weight,)


def joined_by_hand(
    name: str, like: Tensor, parts: list[Tensor], gated: bool, heads: int, groups: int
) -> Tensor:
    if like.dim() == 3:
        each = 2 if gated and name.endswith("up") else 1
        return torch.stack([torch.cat(parts[i : i + each]) for i in range(0, len(parts), each)])
    if name.endswith("qkv.weight"):
        size = like.shape[0] // (heads + 2 * groups)
        columns = like.shape[1]
        queries, keys, values = (part.view(groups, -1, size, columns) for part in parts)
        return torch.cat([queries, keys, values], dim=1).reshape(-1, columns)
    return torch.cat(parts)


class PlainMuon:
    """Muon and AdamW written out, weight by weight."""

    def __init__(self, model: nn.Module, config: Any, orthogonal: Callable[[Tensor], Tensor]) -> None:
        self.weights = dict(model.named_parameters())
        self.options: MuonConfig = config.optimizer.muon
        self.gated = config.model.activation == "swiglu"
        self.heads = config.model.num_attention_heads
        self.groups = config.model.num_query_groups or self.heads
        self.orthogonal = orthogonal
        self.means = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.squares = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        for name, weight in self.weights.items():
            gradient, mean = weight.grad, self.means[name]
            assert gradient is not None
            if any(word in name for word in ADAMW_WORDS):
                square = self.squares[name]
                mean.mul_(0.9).add_(gradient, alpha=0.1)
                square.mul_(0.95).add_(gradient**2, alpha=0.05)
                matrix = weight.dim() >= 2 and "bias" not in name
                weight.mul_(1 - LR * (DECAY if matrix else 0))
                size = (square / (1 - 0.95**self.count)).sqrt() + 0.001
                weight.sub_(LR * mean / (1 - 0.9**self.count) / size)
                continue
            m = self.options.momentum
            mean.mul_(m).add_(gradient, alpha=1 - m)
            direction = m * mean + (1 - m) * gradient if self.options.nesterov else mean
            facts = self.gated, self.heads, self.groups
            parts = []
            for part in split_by_hand(name, direction, *facts):
                rows, columns = part.shape
                scale = 0.2 * math.sqrt(max(rows, columns))
                if self.options.update_scale == "spectral":
                    scale = math.sqrt(max(1, rows / columns))
                parts.append(scale * self.orthogonal(part).float())
            weight.mul_(1 - LR * DECAY).sub_(LR * joined_by_hand(name, weight, parts, *facts))


def plain_weights(*overrides: str) -> dict[str, Tensor]:
    config = tiny(*BASE, "optimizer.name=muon", *overrides)
    model = tiny_gpt(config).train()
    rows = step_rows(config.optimizer.muon)
    optimizer = PlainMuon(model, config, lambda part: plain_orthogonal(part, rows))
    for step in range(STEPS):
        model.zero_grad()
        losses_of(model, step).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        assert norm > CLIP
        optimizer.step()
    return {name: weight.detach() for name, weight in model.named_parameters()}


def our_weights(stage: int, *overrides: str) -> dict[str, Tensor]:
    files = f"parallel.deepspeed={ds_config(f'zero{stage}_fp32')}"
    engine = tiny_engine(tiny(files, *BASE, "optimizer.name=muon", *overrides))
    engine.train(True)
    for step in range(STEPS):
        engine.backward(loss_of(engine, step), last=True)
        engine.step(LR)
    weights = dict(engine.model.named_parameters())
    with engine.gathered(weights.values()):
        return {name: weight.detach().clone() for name, weight in weights.items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("system", SYSTEMS)
def test_ten_steps_are_those_of_a_plain_muon(one_rank: None, system: str) -> None:
    expected = plain_weights(*SYSTEMS[system])
    for stage in (0, 1, 2, 3):
        assert_close(our_weights(stage, *SYSTEMS[system]), expected)


@pytest.mark.parametrize("variant", ["spectral", "polar_express"])
def test_the_options_are_those_of_a_plain_muon(one_rank: None, variant: str) -> None:
    overrides = (*SYSTEMS["gated"], *VARIANTS[variant])
    assert_close(our_weights(0, *overrides), plain_weights(*overrides))
