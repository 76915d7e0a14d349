"""Experts of several sub-layers: S(x) - x against a plain loop with every gradient, and the start."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.config.schema import Activation
from megamoe.moe.experts.stack import ExpertStack, NormKind
from tests.support.moe.build import FFN, HIDDEN, STARTS, make_hidden, make_layer, moe_config
from tests.support.moe.plain import plain_expert


def make_stack(
    num_sublayers: int,
    norm: NormKind = "rmsnorm",
    activation: Activation = "swiglu",
    expert_ids: range = range(4),
    norm_eps: float = 1e-5,
) -> ExpertStack:
    options: dict[str, Any] = {"norm": norm, "norm_eps": norm_eps, "activation": activation, **STARTS}
    return ExpertStack(num_sublayers, HIDDEN, FFN, expert_ids, **options)


@pytest.mark.parametrize(
    ("num_sublayers", "norm", "activation"), [(2, "rmsnorm", "swiglu"), (3, "layernorm", "gelu")]
)
@pytest.mark.parametrize("counts", [[3, 0, 1, 4], [0, 0, 0, 0]], ids=str)
def test_the_stack_is_the_loop_over_its_sub_layers(
    num_sublayers: int, norm: NormKind, activation: Activation, counts: list[int]
) -> None:
    stack = make_stack(num_sublayers, norm, activation)
    generator = torch.Generator().manual_seed(3)
    for parameter in stack.norms.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.5)
    rows_NH = make_hidden(sum(counts)).requires_grad_()
    found = [rows_NH, *stack.parameters()]
    output_NH = stack(rows_NH, torch.tensor(counts))
    exact = [tensor.detach().double().requires_grad_() for tensor in found]
    weights = {f"experts.{n}": w for n, w in zip(dict(stack.named_parameters()), exact[1:], strict=True)}
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    rows = [plain_expert(weights, e, exact[0][n], activation) for n, e in enumerate(experts)]
    expected_NH = torch.stack(rows) if rows else exact[0] * 0
    torch.testing.assert_close(output_NH.double(), expected_NH, rtol=1e-4, atol=1e-5)
    direction_NH = make_hidden(sum(counts), seed=4)
    gradients = torch.autograd.grad((output_NH * direction_NH).sum(), found)
    right = torch.autograd.grad((expected_NH * direction_NH).sum(), exact, materialize_grads=True)
    for gradient, expected in zip(gradients, right, strict=True):
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_the_norms_gradients_are_not_added_by_a_row_lookup(norm: NormKind) -> None:
    """Its backward adds atomically on CUDA, in the weights' dtype: in bf16 8,192 ones would make 256."""
    stack = make_stack(2, norm)
    output_NH = stack(make_hidden(8).requires_grad_(), torch.tensor([3, 0, 1, 4]))
    found, seen = [output_NH.grad_fn], set()
    while found:
        node = found.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found += [before for before, _ in node.next_functions]
    names = {node.name() for node in seen}
    assert "_ExpertRowsBackward" in names and not {name for name in names if name.startswith("Index")}


def test_the_identity_counts_once() -> None:
    """A token at weight w gets x + w (S(x) - x); with sub-layers that write nothing, x itself."""
    tree = {"num_experts": 4, "expert_sublayers": 2, "router": {"selector": {"k": 1, "weights": "raw"}}}
    layer = make_layer(moe_config(**tree))
    for sublayer in layer.get_submodule("experts.sublayers").children():
        sublayer.get_parameter("down").data.zero_()
    assert not layer(make_hidden(6)).any()


def test_eps_is_the_models() -> None:
    """Rows as small as their norm's eps: RMSNorm gives x / sqrt(mean(x^2) + eps)."""
    rows_NH = torch.full((1, HIDDEN), 0.1)
    norms = [make_stack(1, norm_eps=eps).norms[0](rows_NH, torch.tensor([0])) for eps in (0.0, 0.03)]
    torch.testing.assert_close(norms[0], torch.ones(1, HIDDEN))
    torch.testing.assert_close(norms[1], torch.full((1, HIDDEN), 0.5))  # 0.1 / sqrt(0.01 + 0.03)


def test_sub_layers_and_experts_start_apart_and_alike_whatever_the_split() -> None:
    whole, part = make_stack(2), make_stack(2, expert_ids=range(2, 4))
    for name, weight in part.named_parameters():
        assert torch.equal(weight, whole.get_parameter(name)[2:])
    first, second = (dict(sublayer.named_parameters()) for sublayer in whole.sublayers)
    assert not torch.equal(first["up"], second["up"]) and not torch.equal(first["up"][0], first["up"][1])
    assert not torch.equal(first["down"], second["down"])


def test_norms_are_vectors_of_an_expert_and_weights_its_matrices() -> None:
    """The optimiser lets decay what has two dimensions in one expert."""
    dimensions: dict[str, int] = {
        name: weight.dim() - 1 for name, weight in make_stack(2, "layernorm").named_parameters()
    }
    decay = {name for name, number in dimensions.items() if number >= 2}
    assert decay == {f"sublayers.{n}.{weight}" for n in (0, 1) for weight in ("up", "down")}
    assert {name for name in dimensions if name not in decay} == {
        f"norms.{n}.{weight}" for n in (0, 1) for weight in ("weight", "bias")
    }


def test_bf16_in_padded_groups_is_close_to_fp32() -> None:
    counts_E = torch.tensor([30, 64, 0, 7])
    stack = make_stack(2).to(torch.bfloat16)
    rows_NH = make_hidden(101).to(torch.bfloat16)
    output_NH: Tensor = stack(rows_NH, counts_E)
    expected_NH = stack.float()(rows_NH.float(), counts_E)
    assert output_NH.dtype == torch.bfloat16
    assert (output_NH.float() - expected_NH).norm() < 0.02 * expected_NH.norm()
