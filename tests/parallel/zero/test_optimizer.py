"""AdamW: which parameters decay, and clipping as PyTorch does it."""

import copy

import pytest
import torch
from torch import nn

from megamoe.parallel.zero.optimizer import Stage0AdamW, adamw_options, parameter_groups
from tests.tiny import tiny, tiny_gpt


def test_stage_0_clips_as_pytorch_does(one_rank: None) -> None:
    """Several steps: some gradients above the limit, some below."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    theirs = copy.deepcopy(ours)
    config = tiny("optimizer.weight_decay=0.3").optimizer
    options = adamw_options(config)
    first = Stage0AdamW(parameter_groups(ours, config), grad_clip=1.0, **options)
    second = torch.optim.AdamW(parameter_groups(theirs, config), **options)
    for scale in (10.0, 0.01, 3.0):
        inputs = torch.randn(4, 5)
        for model, optimizer in ((ours, first), (theirs, second)):
            optimizer.zero_grad()
            (model(inputs).square().sum() * scale).backward()
        norm = float(nn.utils.clip_grad_norm_(theirs.parameters(), 1.0))
        first.step()
        second.step()
        assert first._global_grad_norm == pytest.approx(norm, rel=1e-6)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def test_clipping_can_be_off(one_rank: None) -> None:
    model = nn.Linear(3, 3)
    config = tiny().optimizer
    optimizer = Stage0AdamW(parameter_groups(model, config), grad_clip=0.0, **adamw_options(config))
    (model(torch.ones(1, 3)).sum() * 100).backward()
    assert model.bias.grad is not None
    optimizer.step()
    assert model.bias.grad.tolist() == [100.0] * 3


def test_which_parameters_decay(one_rank: None) -> None:
    config = tiny(
        "model.bias=true",
        "model.norm=layernorm",
        "model.position=learned",
        "model.tie_embeddings=false",
        "moe.layers={at: [2]}",
        "moe.num_shared_experts=1",
        "optimizer.weight_decay=0.3",
    )
    model = tiny_gpt(config)
    layer = dict(model.moe_layers())[2]
    layer.router.register_parameter("vector", nn.Parameter(torch.zeros(4)))  # as a learned bias of scores
    names = {parameter: name for name, parameter in model.named_parameters()}
    decays: dict[str, tuple[float, bool]] = {}
    for group in parameter_groups(model, config.optimizer):
        for parameter in group["params"]:
            assert names[parameter] not in decays
            decays[names[parameter]] = (group["weight_decay"], group.get("moe", False))
    assert set(decays) == set(names.values())
    experts = {name for name in decays if ".experts." in name}
    assert len(experts) == 2 and all(decays[name] == (0.3, True) for name in experts)
    assert not any(is_expert for name, (_, is_expert) in decays.items() if name not in experts)
    without = {name for name, (decay, _) in decays.items() if decay == 0}
    vectors = ("bias", "layernorm.weight", "router.vector")
    assert without == {name for name in decays if name.endswith(vectors)}
    matrices = {name.rsplit(".", 2)[-2] for name in set(decays) - without - experts}
    assert matrices >= {
        "word_embeddings",
        "position_embeddings",
        "linear_qkv",
        "output_layer",
        "scorer",
        "shared",
    }
