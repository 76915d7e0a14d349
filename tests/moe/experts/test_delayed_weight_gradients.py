"""Weight gradients that are put off: the same bits, and their place in the backward pass."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.kernels.choice import Kernels
from megamoe.kernels.experts import grouped_gemm
from megamoe.kernels.experts.grouped_gemm import DelayedWeightGradients
from megamoe.moe.experts.grouped import GroupedExperts

PLAIN = Kernels(compiled=False)
COUNTS = torch.tensor([5, 0, 7, 4])


def make_experts(activation: Any = "swiglu", **options: Any) -> GroupedExperts:
    sizes: dict[str, Any] = {"std": 0.3, "output_std": 0.3, "seed": 3, "layer": 1, "kernels": PLAIN}
    return GroupedExperts(16, 32, range(4), activation=activation, **sizes, **options)


def gradients(experts: GroupedExperts, delayed: DelayedWeightGradients | None) -> dict[str, Tensor]:
    experts.zero_grad()
    rows_NH = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    output_NH = experts(rows_NH, COUNTS, None, delayed)
    output_NH.square().sum().backward()
    assert rows_NH.grad is not None
    named = {name: parameter.grad for name, parameter in experts.named_parameters()}
    return {"output": output_NH.detach(), "rows": rows_NH.grad, **named}


@pytest.mark.parametrize("options", [{}, {"activation": "gelu", "bias": True}])
def test_they_are_the_same_to_the_bit(options: dict[str, Any]) -> None:
    experts = make_experts(**options)
    now = gradients(experts, None)
    delayed = gradients(experts, experts.put_off_gradients())
    assert delayed.keys() == now.keys()
    for name, value in now.items():
        assert torch.equal(delayed[name], value), name


class Marked(torch.autograd.Function):
    """Notes when the backward pass goes by."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, name: str, order: list[str]) -> Tensor:
        ctx.name, ctx.order = name, order
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.order.append(ctx.name)
        return gradient[0], None, None


def test_an_exchange_between_runs_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange of the gradients starts where its result was received and ends where it was sent."""
    order: list[str] = []
    real = grouped_gemm._to_weight

    def to_weight(*given: Any) -> Tensor:
        order.append("weight")
        return real(*given)

    monkeypatch.setattr(grouped_gemm, "_to_weight", to_weight)
    for puts_off in (True, False):
        order.clear()
        experts = make_experts()
        rows = torch.randn(16, 16, requires_grad=True)
        sent: Tensor = Marked.apply(rows, "wait", order)
        delayed = experts.put_off_gradients() if puts_off else None
        shared: Tensor = Marked.apply(rows, "shared", order)
        received: Tensor = Marked.apply(sent, "begin", order)
        (experts(received, COUNTS, None, delayed) + shared).sum().backward()
        expected = ["begin", "shared", "weight", "weight", "wait"]
        assert order == (expected if puts_off else ["weight", "weight", "begin", "shared", "wait"])


def test_nothing_is_put_off_where_nothing_is_wanted() -> None:
    experts = make_experts()
    with torch.no_grad():
        assert experts.put_off_gradients() is None
    experts.requires_grad_(False)
    assert experts.put_off_gradients() is None
