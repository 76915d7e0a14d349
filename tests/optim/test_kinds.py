"""AdamW and Adam at every ZeRO stage, against PyTorch's own on the same model; and where Adam is refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import deepspeed.ops.adam
import pytest
import torch
from torch import nn

from megamoe.kernels.choice import Kernels
from megamoe.model.architectures.decoder import GPT
from megamoe.optim.optimizers import parameter_groups
from megamoe.parallel.launch import World
from megamoe.parallel.zero.deepspeed_config import ParallelPlan
from megamoe.parallel.zero.engine import Engine, _build_optimizer
from tests.support.ranks.runs import ds_config
from tests.support.tiny import VOCABULARY, tiny, tiny_engine, tiny_gpt

KINDS: dict[str, Any] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
OPTIONS = ("optimizer.weight_decay=0.5", "optimizer.grad_clip=0.05", "optimizer.eps=0.001")
STEPS, LR = 3, 0.01


def inputs_of(step: int) -> dict[str, torch.Tensor]:
    text = torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(step))
    places = torch.arange(8).expand_as(text)
    return {"tokens_BS": text, "position_ids_BS": places, "labels_BS": text.roll(-1, 1)}


def losses_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(*inputs_of(step).values()).mean()


def loss_of(engine: Engine, step: int) -> torch.Tensor:
    return engine.forward(**inputs_of(step)).mean()


def reference(name: str, groups_of: Callable[[GPT], list[dict[str, Any]]]) -> dict[str, torch.Tensor]:
    """Return the weights after plain PyTorch's steps."""
    model = tiny_gpt(tiny(*OPTIONS)).train()
    optimizer = KINDS[name](groups_of(model), lr=LR, betas=(0.9, 0.95), eps=0.001)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses_of(model, step).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.05
        optimizer.step()
    return {name: weight.detach() for name, weight in model.named_parameters()}


def stepped(stage: int, *overrides: str, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Return the weights after the same steps of our engine."""
    engine = tiny_engine(tiny(f"parallel.deepspeed={ds_config(f'zero{stage}_fp32')}", *OPTIONS, *overrides))
    engine.train(True)
    for step in range(steps):
        engine.backward(loss_of(engine, step), last=True)
        engine.step(LR)
    weights = dict(engine.model.named_parameters())
    with engine.gathered(weights.values()):
        return {name: weight.detach().clone() for name, weight in weights.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.fixture(scope="module")
def references(one_rank: None) -> dict[str, dict[str, torch.Tensor]]:
    """Return them with the groups of `optimizer.weight_decay`."""
    config = tiny(*OPTIONS).optimizer
    return {name: reference(name, lambda model: parameter_groups(model, config)) for name in KINDS}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_steps_are_pytorchs(references: dict[str, dict[str, torch.Tensor]], name: str, stage: int) -> None:
    found = stepped(stage, f"optimizer.name={name}")
    assert_same(found, references[name])
    other = references["adam" if name == "adamw" else "adamw"]
    assert max(float((weight - other[key]).abs().max()) for key, weight in found.items()) > 1e-3


@pytest.mark.parametrize("name", KINDS)
def test_an_offloaded_optimizer_is_deepspeeds_of_the_same_kind(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The options on CUDA; the op itself is compiled for it."""
    built: dict[str, Any] = {}
    monkeypatch.setattr(
        deepspeed.ops.adam, "DeepSpeedCPUAdam", lambda groups, **options: built.update(options)
    )
    config = tiny(f"optimizer.name={name}", *OPTIONS)
    world = cast(World, SimpleNamespace(device=torch.device("cuda")))
    content = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    _build_optimizer(
        config,
        parameter_groups(nn.Linear(3, 2), config.optimizer),
        ParallelPlan.of(config, 1, content),
        world,
        Kernels(),
    )
    assert built == {
        "adamw_mode": name == "adamw",
        "lr": 3e-4,
        "betas": (0.9, 0.95),
        "eps": 0.001,
        "weight_decay": 0.5,
    }
