"""`optimizer.groups`: other learning rates and weight decays by name, against PyTorch's own groups."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.config import dump_yaml
from megamoe.errors import UserError
from megamoe.model.architectures.decoder import GPT
from megamoe.optim.optimizers import parameter_groups
from megamoe.train.trainer import Trainer
from tests.optim.test_kinds import KINDS, LR, OPTIONS, assert_same, loss_of, reference, stepped
from tests.support.ranks.runs import ds_config
from tests.support.tiny import restored_process, tiny, tiny_engine, tiny_gpt

GROUPS = (
    r"optimizer.groups=[{pattern: 'router\.', lr_scale: 0.1, weight_decay: 0.0}, "
    r"{pattern: 'layers\.1.*experts\.up$', lr_scale: 3, weight_decay: 0.2}, "
    "{pattern: layernorm, lr_scale: 0.5, weight_decay: 0.7}, {pattern: 'experts|qkv', lr_scale: 0}]"
)
DECAY = 0.5  # of OPTIONS


def by_hand(name: str) -> tuple[float, float]:
    """(times the learning rate, weight decay) of a parameter."""
    if "router" in name:
        return 0.1, 0.0
    if "layers.1" in name and name.endswith("experts.up"):
        return 3.0, 0.2
    if "layernorm" in name:
        return 0.5, 0.7
    if "experts" in name or "qkv" in name:
        return 0.0, DECAY
    return 1.0, DECAY


@pytest.fixture(scope="module")
def references(one_rank: None) -> dict[str, dict[str, torch.Tensor]]:
    """Return the weights after PyTorch's steps, with each parameter in a separate group."""
    return {kind: reference(kind, groups_by_hand) for kind in KINDS}


def groups_by_hand(model: GPT) -> list[dict[str, Any]]:
    groups = []
    for name, parameter in model.named_parameters():
        scale, decay = by_hand(name)
        groups.append({"params": [parameter], "lr": LR * scale, "weight_decay": decay})
    return groups


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_pytorchs_groups(
    references: dict[str, dict[str, torch.Tensor]], kind: str, stage: int
) -> None:
    start = dict(tiny_gpt(tiny(*OPTIONS)).named_parameters())
    found = stepped(stage, f"optimizer.name={kind}", GROUPS)
    assert_same(found, references[kind])
    for name, weight in found.items():
        assert torch.equal(weight, start[name]) == (by_hand(name)[0] == 0), name


def test_the_masters_of_a_bf16_model_are_in_the_same_groups(one_rank: None) -> None:
    bf16 = ("parallel.precision=bf16", "moe.expert_ffn_hidden_size=16")
    config = tiny(GROUPS, *OPTIONS, *bf16)
    engine = tiny_engine(config)
    engine.train(True)
    engine.backward(loss_of(engine, 0), last=True)
    engine.step(LR)
    wanted: dict[tuple[float, float], int] = {}
    for name, weight in engine.model.named_parameters():
        scale, decay = by_hand(name)
        key = (LR * scale, decay if weight.dim() > 1 or "layernorm" in name else 0.0)
        wanted[key] = wanted.get(key, 0) + weight.numel()
    found: dict[tuple[float, float], int] = {}
    for group in engine.inner_optimizer.param_groups:
        key = (group["lr"], group["weight_decay"])
        found[key] = found.get(key, 0) + sum(master.numel() for master in group["params"])
    assert found == wanted


def test_without_groups_the_optimizers_are_as_before(one_rank: None) -> None:
    groups = parameter_groups(tiny_gpt(tiny()), tiny().optimizer)
    assert [(group["weight_decay"], group["lr_scale"]) for group in groups] == [(0.1, 1), (0, 1), (0.1, 1)]
    assert [group.get("moe", False) for group in groups] == [False, False, True]


@pytest.mark.parametrize(
    ("groups", "line"),
    [
        (
            r"[{pattern: 'rooter\.'}]",
            r"optimizer\.groups\.0\.pattern: 'rooter\\\\\.' matches no trained parameter; "
            r"expected a part of names such as model\..*router.*",
        ),
        (
            "[{pattern: router}, {pattern: scorer}]",
            "optimizer.groups.1.pattern: 'scorer': .* belong to groups before it; move it up, or take it out",
        ),
    ],
)
def test_a_pattern_without_a_parameter_is_refused(one_rank: None, groups: str, line: str) -> None:
    config = tiny(f"optimizer.groups={groups}")
    with pytest.raises(UserError) as refused:
        parameter_groups(tiny_gpt(config), config.optimizer)
    assert re.fullmatch(line, str(refused.value)), str(refused.value)


def test_a_frozen_parameter_is_not_trained(one_rank: None) -> None:
    config = tiny("moe.frozen=[router]", r"optimizer.groups=[{pattern: 'router\.'}]")
    with pytest.raises(UserError, match="matches no trained parameter"):
        parameter_groups(tiny_gpt(config), config.optimizer)


def test_no_pattern_takes_long(one_rank: None) -> None:
    """Backtracking would go through 2^n ways to cut a name into words."""
    hostile = r"^(\w+\.?)+!$"
    config = tiny(f"optimizer.groups=[{{pattern: '{hostile}'}}]")
    started = time.perf_counter()
    with pytest.raises(UserError, match="matches no trained parameter"):
        parameter_groups(tiny_gpt(config), config.optimizer)
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.full) for stage in (2, 3))])
def test_a_run_resumes_with_other_parameter_groups(stage: int, tmp_path: Path) -> None:
    """Moments go by the parameter's name: with groups that change nothing, the steps are the same ones."""
    path = f"parallel.deepspeed={ds_config(f'zero{stage}_fp32')}"
    common = [f"output={tmp_path}", path, "evaluation.batches=0", "train.steps=4"]
    nothing = r"optimizer.groups=[{pattern: 'layers\.1'}, {pattern: 'experts\.up|norm'}]"
    wanted = losses(4, *common, "name=whole")
    first = losses(2, *common, "name=cut", save=True)
    rest = losses(2, *common, "name=cut", "checkpoint.resume=auto", nothing)
    assert first + rest == pytest.approx(wanted, rel=1e-6)
    other = losses(2, *common, "name=cut", "checkpoint.resume=auto", nothing.replace("1'", "1', lr_scale: 9"))
    assert other[1] != pytest.approx(wanted[3], rel=1e-6)


def losses(steps: int, *overrides: str, save: bool = False) -> list[float]:
    with restored_process():
        trainer = Trainer(tiny(*overrides))
        try:
            found = [trainer.step()[0].lm_loss for _ in range(steps)]
            if save:
                trainer.save()
        finally:
            trainer.close()
    return found


def test_groups_are_written_out() -> None:
    assert "lr_scale: 0.1" in dump_yaml(tiny(GROUPS))
