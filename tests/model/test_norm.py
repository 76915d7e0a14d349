"""Our norm against PyTorch's modules."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megamoe.model.modules import Norm

HIDDEN = 12


def config(normalization: str, sequence_parallel: bool = False) -> SimpleNamespace:
    return SimpleNamespace(normalization=normalization, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("RMSNorm", nn.RMSNorm(HIDDEN, eps=0.1)), ("LayerNorm", nn.LayerNorm(HIDDEN, eps=0.1))],
)
def test_it_is_pytorchs(name: str, theirs: nn.Module) -> None:
    torch.manual_seed(0)
    ours = Norm(config(name), HIDDEN, eps=0.1)
    assert [(key, value.tolist()) for key, value in ours.named_parameters()] == [
        (key, value.tolist()) for key, value in theirs.named_parameters()
    ]
    with torch.no_grad():
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.copy_(mine.normal_())
    hidden = torch.randn(3, 2, HIDDEN) * 4 + 1
    upstream = torch.randn(3, 2, HIDDEN)
    found = []
    for module in (ours, theirs):
        leaf = hidden.clone().requires_grad_()
        output = module(leaf)
        found.append([output, *torch.autograd.grad(output, [leaf, *module.parameters()], upstream)])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("sequence", [True, False])
def test_the_mark_says_whether_gradients_are_parts(name: str, sequence: bool) -> None:
    parameters = list(Norm(config(name, sequence), HIDDEN).parameters())
    assert len(parameters) == (2 if name == "LayerNorm" else 1)
    marks = [getattr(parameter, "sequence_parallel", None) for parameter in parameters]
    assert marks == [sequence] * len(parameters)


def test_it_keeps_the_dtype_and_takes_other_keywords() -> None:
    norm = Norm(config("LayerNorm"), HIDDEN, eps=1e-6, persist_layer_norm=True).bfloat16()
    assert norm.eps == 1e-6
    assert norm(torch.randn(4, HIDDEN, dtype=torch.bfloat16)).dtype == torch.bfloat16
