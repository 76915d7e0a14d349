"""Shared experts: each mode against its formula, with every gradient, and how they start."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from megamoe.config.schema import Activation
from megamoe.moe.experts.shared import SharedExperts, SharedMode
from tests.support.moe.build import FFN, HIDDEN, STARTS, make_hidden
from tests.support.moe.plain import plain_activation


def make_shared(mode: SharedMode, activation: Activation = "swiglu") -> SharedExperts:
    return SharedExperts(HIDDEN, FFN, activation=activation, mode=mode, **STARTS)


def with_routed(shared: SharedExperts, hidden_TH: Tensor, routed_TH: Tensor) -> Tensor:
    return shared.join(hidden_TH, shared(hidden_TH), routed_TH)


def formula(
    weights: dict[str, Tensor], hidden_TH: Tensor, routed_TH: Tensor, activation: Activation
) -> Tensor:
    inner_TF = plain_activation(hidden_TH @ weights["up"].T, activation)
    shared_TH = inner_TF @ weights["down"].T
    if "gate" in weights:
        shared_TH = shared_TH / (1 + (-hidden_TH @ weights["gate"][:, None]).exp())
    if "mix" in weights:
        odds_T2 = (hidden_TH @ weights["mix"].T + weights["mix_bias"]).exp()
        share_T1 = odds_T2[:, 1:] / odds_T2.sum(1, keepdim=True)
        return (1 - share_T1) * routed_TH + share_T1 * shared_TH
    return routed_TH + shared_TH


@pytest.mark.parametrize("mode", ["sum", "gated", "residual"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "reglu"])
def test_each_mode_is_its_formula_with_every_gradient(activation: Activation, mode: SharedMode) -> None:
    shared = make_shared(mode, activation)
    generator = torch.Generator().manual_seed(3)
    for parameter in shared.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    inputs = [make_hidden(5), make_hidden(5, seed=9), *shared.parameters()]
    hidden_TH, routed_TH = (tensor.requires_grad_() for tensor in inputs[:2])
    output_TH = with_routed(shared, hidden_TH, routed_TH)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    weights = dict(zip(dict(shared.named_parameters()), exact[2:], strict=True))
    expected_TH = formula(weights, exact[0], exact[1], activation)
    torch.testing.assert_close(output_TH.double(), expected_TH, rtol=1e-4, atol=1e-5)
    direction_TH = make_hidden(5, seed=4)
    found = torch.autograd.grad((output_TH * direction_TH).sum(), inputs)
    right = torch.autograd.grad((expected_TH * direction_TH).sum(), exact)
    for gradient, expected in zip(found, right, strict=True):
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-5)


def test_gates_start_even() -> None:
    """sigmoid(0) for the gate; the bias of the mix is 0, so that only W speaks, which is drawn."""
    hidden_TH, routed_TH = make_hidden(5), make_hidden(5, seed=9)
    alone_TH = make_shared("sum")(hidden_TH)
    gated_TH = with_routed(make_shared("gated"), hidden_TH, routed_TH)
    torch.testing.assert_close(gated_TH, routed_TH + alone_TH / 2)
    residual = make_shared("residual")
    assert not residual.mix_bias.any() and residual.mix.std() > 0.2
    residual.mix.data.zero_()
    torch.testing.assert_close(with_routed(residual, hidden_TH, routed_TH), (routed_TH + alone_TH) / 2)


def test_on_cuda_they_wait_for_their_input_and_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the order of the streams on a CPU that pretends to be a GPU; results and gradients do not
    change.
    """
    hidden_TH, routed_TH = make_hidden(5), make_hidden(5, seed=9)
    expected = gradients(make_shared("sum"), hidden_TH, routed_TH)
    message: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            message.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        message.append(f"on {stream.name}")
        yield
        message.append(f"off {stream.name}")

    main, side = Stream("main"), Stream("side")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr("megamoe.moe.experts.shared._side_stream", lambda device: side)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: message.append(f"kept for {stream.name}")
    )
    found = gradients(make_shared("sum"), hidden_TH, routed_TH)
    monkeypatch.undo()
    assert message == [
        "side waits for main",
        "on side",
        "off side",
        *["kept for side"] * 3,  # the input and the weights
        "main waits for side",
        "kept for main",  # the output
        *["kept for side"] * 2,  # the weights, once more in the backward pass
    ]
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def gradients(shared: SharedExperts, hidden_TH: Tensor, routed_TH: Tensor) -> list[Tensor]:
    inputs = [hidden_TH.clone().requires_grad_(), *shared.parameters()]
    output_TH = with_routed(shared, inputs[0], routed_TH)
    return [output_TH, *torch.autograd.grad(output_TH.square().sum(), inputs)]
