"""Refusals of the experts' exchange: fixed shares with padding, missing types and weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.parallel.layout import Layout
from megamoe.validation.exchange import exchange_problems
from tests.moe.dispatch.test_choice import config_of

PLAIN_EXCHANGE = """
from dataclasses import dataclass

from megamoe.moe.dispatch.dispatcher import Dispatcher
from megamoe.registry import register


@register("exchange", "plain")
class Plain(Dispatcher):
    @dataclass
    class Config:
        pass
"""
PADDED = ("moe.router.capacity={name: per_expert, pad: true}", "parallel.expert=2")


@pytest.fixture
def refused(pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Call --check; returns its lines of the two keys under test."""

    def call(*arguments: str) -> list[str]:
        pretrain("--check", *arguments)
        lines = [line.removeprefix("error: ") for line in capsys.readouterr().err.splitlines()]
        keys = ("moe.router.capacity.pad", "moe.weights_in_activation")
        return [line for line in lines if line.startswith(keys)]

    return call


def test_fp8_needs_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(exchange_dtype="fp8")
    layout = Layout.of(config.parallel, 16)
    assert not list(exchange_problems(config, layout))
    monkeypatch.delattr(torch, "float8_e4m3fn")
    (problem,) = exchange_problems(config, layout)
    assert "this PyTorch has no float8_e4m3fn; set it to model" in str(problem)


@pytest.mark.parametrize(
    ("arguments", "padded"),
    [
        (["model.architecture=encoder", "train.objective=masked"], "an encoder"),
        (["train.objective=chat"], "the objective chat"),
    ],
)
def test_fixed_shares_with_padding(refused: Callable[..., list[str]], arguments: Any, padded: str) -> None:
    assert refused(*PADDED, *arguments) == [
        f"moe.router.capacity.pad: the micro batches of {padded} have padding; legal with expert ranks: false"
    ]
    assert not refused(*PADDED, *arguments, "parallel.expert=1")
    assert not refused(*PADDED)


def test_weights_that_an_exchange_does_not_send(refused: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN_EXCHANGE)
    inside = ("moe.weights_in_activation=true", "parallel.expert=2")
    assert not refused(*inside)
    arguments = (f"plugins=[{tmp_path}/plain.py]", "parallel.exchange=plain", *inside)
    assert refused(*arguments) == [
        "moe.weights_in_activation: true, but the exchange plain does not send the weights to the experts; "
        "set it to false, or parallel.exchange to auto, direct or by_node"
    ]
    assert not refused(*arguments, "parallel.expert=1")
