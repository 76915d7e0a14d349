"""AdamW: which parameters decay, and clipping as PyTorch does it."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from megamoe.kernels.adamw import AdamW
from megamoe.optim.optimizers import (
    MasterWeightAdamW,
    Stage0AdamW,
    adamw_options,
    parameter_groups,
    zero_optimizer,
)
from megamoe.optim.short_moments import ShortMoments
from tests.support.tiny import tiny, tiny_gpt


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_stage_0_clips_as_pytorch_does(one_rank: None, kind: type[torch.optim.Adam]) -> None:
    """Several steps: some gradients above the limit, some below."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    theirs = copy.deepcopy(ours)
    config = tiny("optimizer.weight_decay=0.3").optimizer
    options = adamw_options(config)
    decoupled = kind is torch.optim.AdamW
    groups = parameter_groups(ours, config)
    first = Stage0AdamW(groups, grad_clip=1.0, decoupled_weight_decay=decoupled, **options)
    second = kind(parameter_groups(theirs, config), **options)
    for scale in (10.0, 0.01, 3.0):
        inputs = torch.randn(4, 5)
        for model, optimizer in ((ours, first), (theirs, second)):
            optimizer.zero_grad()
            (model(inputs).square().sum() * scale).backward()
        norm = float(nn.utils.clip_grad_norm_(theirs.parameters(), 1.0))
        first.step()
        second.step()
        assert first.grad_norm == pytest.approx(norm, rel=1e-6)
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


def test_masters_sum_gradients_in_fp32(one_rank: None) -> None:
    """Two micro batches a step; one step skips_update, one has no gradient of `unused`, one is not finite."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)}).bfloat16()
    config = tiny().optimizer
    options = adamw_options(config)
    ours = MasterWeightAdamW(parameter_groups(model, config), grad_clip=0.0, **options)
    exact = [parameter.detach().float().clone().requires_grad_() for parameter in ours.model_parameters]
    theirs = torch.optim.AdamW(exact, **{**options, "weight_decay": 0.0})
    for group in ours.param_groups:
        group["weight_decay"] = 0.0
    for step in range(5):
        sums = [torch.zeros_like(parameter) for parameter in exact]
        for _ in range(2):
            factor = torch.inf if step == 3 else 1.0
            inputs = factor * torch.randn(4, 3).bfloat16()
            outputs = [model["used"](inputs), *([model["unused"](inputs)] if step != 2 else [])]
            loss = sum((output.square().sum() for output in outputs), torch.zeros(()))
            present = list(model["used"].parameters() if step == 2 else model.parameters())
            gradients = dict(zip(present, torch.autograd.grad(loss, present, retain_graph=True), strict=True))
            for total, parameter in zip(sums, ours.model_parameters, strict=True):
                total += gradients.get(parameter, torch.zeros_like(parameter)).float()
            loss.backward()
        ours.skips_update = step == 1
        ours.step()
        norm = torch.stack([total.square().sum() for total in sums]).sum().sqrt()
        assert ours.grad_norm == pytest.approx(float(norm), rel=1e-5, nan_ok=True)
        if step not in (1, 3):
            for expected, total in zip(exact, sums, strict=True):
                expected.grad = total
            theirs.step()
    for master, other in zip(ours.masters(), exact, strict=True):
        torch.testing.assert_close(master, other, rtol=1e-6, atol=1e-7)
    for parameter, master in zip(ours.model_parameters, ours.masters(), strict=True):
        assert torch.equal(parameter, master.bfloat16())


def test_masters_go_with_the_model(one_rank: None) -> None:
    model = nn.Linear(3, 2).bfloat16()
    config = tiny().optimizer
    optimizer = MasterWeightAdamW(parameter_groups(model, config), grad_clip=0.0, **adamw_options(config))
    model(torch.ones(1, 3).bfloat16()).sum().backward()
    optimizer.step()
    held = [weakref.ref(each) for each in (optimizer, model.weight, *optimizer.masters())]
    del model, optimizer
    gc.collect()
    assert [each() for each in held] == [None] * len(held)


def test_a_gradient_is_summed_before_and_after_the_reduction_reads_it(one_rank: None) -> None:
    """The engine gets the sums themselves, and reading them twice changes nothing."""
    model = nn.Linear(2, 1, bias=False).bfloat16()
    config = tiny().optimizer
    optimizer = MasterWeightAdamW(parameter_groups(model, config), grad_clip=0.0, **adamw_options(config))
    for _ in range(2):
        for count in (1, 2):
            model(torch.tensor([[1.0, 3.0]]).bfloat16()).sum().backward()
            for _ in range(2):
                (gradient,), expert = optimizer.get_grads_for_reduction()
                assert gradient.tolist() == [[count, 3.0 * count]] and not expert
        optimizer.step()
    (gradient,), _ = optimizer.get_grads_for_reduction()
    assert gradient.tolist() == [[0.0, 0.0]]
    gradient += torch.tensor([[3.0, 4.0]])  # of another rank; this one has none
    optimizer.step()
    assert optimizer.grad_norm == 5.0


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 0.1),
        (["optimizer.name=adam"], 0.0),
        (["optimizer.name=adam", "optimizer.weight_decay=0.01"], 0.01),
        (["optimizer.weight_decay=0"], 0.0),
    ],
)
def test_how_much_decays_by_default(overrides: list[str], expected: float) -> None:
    config = tiny(*overrides).optimizer
    groups = parameter_groups(nn.Linear(3, 2), config)
    assert {group["name"]: group["weight_decay"] for group in groups} == {"decay": expected, "no_decay": 0.0}
    assert adamw_options(config)["weight_decay"] == expected


def test_the_vectors_of_constant_experts_do_not_decay() -> None:
    model = tiny_gpt(config := tiny("moe.zero_experts.constant=2"))
    names = {parameter: name for name, parameter in model.named_parameters()}
    decaying = {
        names[parameter].rpartition(".zero.")[2]: group["name"]
        for group in parameter_groups(model, config.optimizer)
        for parameter in group["params"]
        if ".zero." in names[parameter]
    }
    assert decaying == {"mix": "decay", "vector": "no_decay"}


@pytest.mark.parametrize("name", ["adamw", "adam"])
@pytest.mark.parametrize(("moments", "kind"), [("fp32", AdamW), ("bf16", ShortMoments)])
def test_what_deepspeed_partitions(name: str, moments: str, kind: type[AdamW]) -> None:
    config = tiny(f"optimizer.name={name}", f"optimizer.moments={moments}").optimizer
    optimizer = zero_optimizer(config, parameter_groups(nn.Linear(3, 2), config))
    assert type(optimizer) is kind
    assert {group["decoupled_weight_decay"] for group in optimizer.param_groups} == {name == "adamw"}


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
