"""The short way of Megatron-Core's linear layers: its outputs and gradients, bit for bit."""

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megamoe.model import linears
from megamoe.model.linears import ColumnLinear, RowLinear
from tests.support.tiny import tiny, tiny_gpt, world_of_one


def both(kind: type, own: type, dtype: torch.dtype, **options: Any) -> list[Any]:
    """Return Megatron-Core's layer and ours with the same weights, of a tiny model's configuration."""
    config = _config()
    config.params_dtype = dtype
    layers = []
    for each in (kind, own):
        torch.manual_seed(0)
        layers.append(each(24, 40, config=config, init_method=torch.nn.init.xavier_normal_, **options))
    with torch.no_grad():
        for one, other in zip(*(layer.parameters() for layer in layers), strict=True):
            other.copy_(one)
    return layers


def _config() -> Any:
    model = tiny_gpt(tiny())
    return next(module.config for module in model.modules() if isinstance(module, ColumnParallelLinear))


def results(layer: Any, rows: Tensor, sent: Tensor) -> list[Tensor | None]:
    given = rows.clone().requires_grad_()
    output, bias = layer(given)
    total = output if bias is None else output + bias
    total.backward(sent)
    return [output, given.grad, *(parameter.grad for parameter in layer.parameters())]


KINDS = {
    "column": (ColumnParallelLinear, ColumnLinear, {"gather_output": False}),
    "row": (RowParallelLinear, RowLinear, {"input_is_parallel": True}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [(False, True), (True, True), (True, False)])  # has one, adds it later
def test_as_megatron_core(kind: str, dtype: torch.dtype, bias: tuple[bool, bool]) -> None:
    plain, own, options = KINDS[kind]
    has_bias, later = bias
    torch.manual_seed(1)
    wide = torch.randn(5, 3, 48, dtype=dtype)
    with world_of_one():
        layers = both(plain, own, dtype, bias=has_bias, skip_bias_add=later, **options)
        for rows in (wide[..., :24].contiguous(), wide[..., ::2], wide[0, :, :24].contiguous()):
            sent = torch.randn(*rows.shape[:-1], 40, dtype=dtype)
            expected, found = (results(layer, rows, sent) for layer in layers)
            for one, other in zip(expected, found, strict=True):
                assert one is not None and other is not None
                assert torch.equal(one, other) and one.stride() == other.stride()
            for layer in layers:
                layer.zero_grad()


def test_the_short_way_is_taken_by_whole_weights_that_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Tensor] = []
    given = linears.whole_product

    def product(rows: Tensor, weight_OI: Tensor) -> Tensor:
        taken.append(weight_OI)
        return given(rows, weight_OI)

    monkeypatch.setattr(linears, "whole_product", product)
    with world_of_one():
        _, layer = both(*KINDS["column"][:2], torch.float32, bias=False, gather_output=False)
        rows = torch.randn(4, 24)
        layer(rows)
        assert len(taken) == 1
        layer.weight.requires_grad_(False)  # as where a model is trained in part
        layer(rows)
        assert len(taken) == 1
        other = torch.randn(40, 24, requires_grad=True)
        layer(rows, other)
        assert taken[-1] is other
