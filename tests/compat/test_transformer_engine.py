"""Canaries of Transformer Engine, where it is installed; `tests/model` runs the same code on a stand-in."""

import inspect

import pytest
import torch

from megamoe.compat.startup import TESTED
from megamoe.compat.transformer_engine_compat import FP8_ABILITY, OLDEST, LentWeights, fp8_ability, is_too_old


@pytest.mark.parametrize(
    ("version", "too_old"),
    [("2.2.9", True), ("1.13.0+abc", True), ("2.3", False), ("2.3.0+5bee81e", False), ("10.0", False)],
)
def test_versions(version: str, too_old: bool) -> None:
    assert is_too_old(version) == too_old
    assert OLDEST == "2.3" and "transformer_engine" not in TESTED


def test_fp8_questions() -> None:
    pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    for fp8 in FP8_ABILITY:
        able, reason = fp8_ability(fp8)
        assert able or reason


def test_weights_can_be_lent() -> None:
    pytorch = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    linear = pytorch.GroupedLinear(2, 16, 16, bias=False, params_dtype=torch.float32, device="cpu")
    weights = LentWeights(linear, num_experts=2)
    assert not list(linear.parameters())
    given = torch.ones(2, 16, 16).unbind(0)
    with weights.lent(given) as lent:
        assert lent.weight0 is given[0] and lent.weight1 is given[1]
    assert not hasattr(linear, "weight0")
    arguments = inspect.signature(pytorch.GroupedLinear).parameters
    assert not {"weights", "weight"} & set(arguments), "GroupedLinear takes weights of the caller's now"
