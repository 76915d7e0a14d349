"""Experts: the grouped product against the plain loop, and the start of each expert."""

import functools
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megamoe.config.schema import Activation
from megamoe.kernels.choice import DEFAULT_KERNELS
from megamoe.kernels.experts.grouped_gemm import grouped_product
from megamoe.moe.experts.activations import is_gated
from megamoe.moe.experts.dropout import ExpertDropout
from megamoe.moe.experts.grouped import (
    OWN_PRODUCTS,
    GroupedExperts,
    GroupedProduct,
    Products,
    Slice,
    padded_places,
)
from tests.support.moe.build import FFN, HIDDEN, make_hidden
from tests.support.moe.plain import loop_experts


def make_experts(
    expert_ids: range,
    activation: Activation = "swiglu",
    layer: int = 1,
    seed: int = 0,
    products: Products = OWN_PRODUCTS,
    **more: Any,
) -> GroupedExperts:
    options = {"activation": activation, "seed": seed, "layer": layer, "products": products, **more}
    return GroupedExperts(HIDDEN, FFN, expert_ids, std=0.4, output_std=0.2, **options)


def with_biases(experts: GroupedExperts) -> GroupedExperts:
    """Fill the biases, which start at 0."""
    generator = torch.Generator().manual_seed(11)
    for bias in (experts.up_bias, experts.down_bias):
        assert bias is not None and not bias.any()
        bias.data.normal_(0, 0.5, generator=generator)
    return experts


def run(experts: GroupedExperts, counts: list[int], grouped: bool) -> list[Tensor]:
    """The output and the gradients of the rows and all weights."""
    rows_NH = make_hidden(sum(counts)).requires_grad_()
    counts_E = torch.tensor(counts)
    output_NH = experts(rows_NH, counts_E) if grouped else loop_experts(experts, rows_NH, counts_E)
    objective = (output_NH * torch.linspace(-1, 2, HIDDEN)).sum()
    return [output_NH, *torch.autograd.grad(objective, [rows_NH, *experts.parameters()])]


COUNTS = pytest.mark.parametrize("counts", [[3, 5, 1, 7], [0, 9, 0, 0], [0, 0, 0, 0]], ids=str)


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("counts", [[3, 5, 1, 7], [0, 9, 0, 0], [0, 0, 0, 0], [8, 0, 1, 0]], ids=str)
@pytest.mark.parametrize(("multiple", "bias"), [(None, False), (1, True), (4, True)])
def test_grouped_equals_loop_with_gradients(
    activation: Activation, counts: list[int], multiple: int | None, bias: bool
) -> None:
    """Rows that fill up a group to a multiple get no part of a bias's gradient."""
    products = OWN_PRODUCTS if multiple is None else Products(row_multiple=multiple, host_counts=True)
    experts = make_experts(range(4), activation, products=products, bias=bias)
    if bias:
        assert len(list(with_biases(experts).parameters())) == 4
    for grouped, loop in zip(run(experts, counts, True), run(experts, counts, False), strict=True):
        torch.testing.assert_close(grouped, loop, rtol=1e-5, atol=1e-5)


def test_groups_are_padded_to_whole_units() -> None:
    place_N, padded_E = padded_places(torch.tensor([3, 0, 4, 5]), 4, 12)
    assert padded_E.tolist() == [4, 0, 4, 8]
    assert place_N.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert padded_places(torch.tensor([0, 0]), 4, 0)[0].tolist() == []


@COUNTS
@pytest.mark.parametrize("multiple", [1, 4])
def test_products_are_handed_in(counts: list[int], multiple: int) -> None:
    """One for each weight, which sees whole groups of rows; the results stay the same."""
    made: list[tuple[int, int, int]] = []
    seen: list[list[int]] = []

    def make(*sizes: int) -> GroupedProduct:
        made.append(sizes)  # type: ignore[arg-type]

        def product(rows_NI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
            assert weight_EOI.shape == (sizes[0], sizes[2], sizes[1])
            assert counts_E.sum() == len(rows_NI)
            seen.append(counts_E.tolist())
            return grouped_product(rows_NI, weight_EOI, counts_E, DEFAULT_KERNELS)

        return product

    experts = make_experts(range(4), products=Products(make, row_multiple=multiple, host_counts=True))
    assert made == [(4, HIDDEN, 2 * FFN), (4, FFN, HIDDEN)]
    for found, loop in zip(run(experts, counts, True), run(experts, counts, False), strict=True):
        torch.testing.assert_close(found, loop, rtol=1e-5, atol=1e-5)
    assert seen == [[-(-count // multiple) * multiple for count in counts]] * 2


@pytest.mark.parametrize("counts", [[30, 64, 1, 70], [0, 130, 0, 0], [0, 0, 0, 0]], ids=str)
def test_padded_bf16_equals_the_loop_in_fp32(counts: list[int]) -> None:
    """The results are equal to bf16's 8 bits: each product is rounded once, sums are fp32."""
    rows_NH, counts_E = make_hidden(sum(counts)), torch.tensor(counts)
    weight_H = torch.linspace(-1, 2, HIDDEN)
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        experts = make_experts(range(4)).to(torch.bfloat16).to(dtype)  # the same rounded weights
        rows = rows_NH.to(torch.bfloat16).to(dtype).requires_grad_()
        run_experts = experts if dtype == torch.bfloat16 else functools.partial(loop_experts, experts)
        output_NH = run_experts(rows, counts_E)
        inputs = [rows, experts.up, experts.down]
        found[dtype] = [output_NH, *torch.autograd.grad((output_NH * weight_H.to(dtype)).sum(), inputs)]
    for padded, loop in zip(found[torch.bfloat16], found[torch.float32], strict=True):
        assert padded.dtype == torch.bfloat16 and padded.shape == loop.shape
        size = loop.detach().abs().max() if loop.numel() else 0.0
        torch.testing.assert_close(padded.float(), loop, rtol=0, atol=0.02 * float(size))


def test_loop_is_the_formula() -> None:
    rows_NH = make_hidden(2)
    experts = make_experts(range(2))
    up, down = experts.up[1], experts.down[1]
    inner = up @ rows_NH[1]
    expected = down @ (functional.silu(inner[:FFN]) * inner[FFN:])
    torch.testing.assert_close(loop_experts(experts, rows_NH, torch.tensor([1, 1]))[1], expected)
    experts = make_experts(range(1), "gelu")
    expected = experts.down[0] @ functional.gelu(experts.up[0] @ rows_NH[0])
    torch.testing.assert_close(loop_experts(experts, rows_NH[:1], torch.tensor([1]))[0], expected)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_initial_weights_do_not_depend_on_the_split(num_ranks: int) -> None:
    whole, size = make_experts(range(8)), 8 // num_ranks
    torch.manual_seed(num_ranks)  # the start must not depend on it
    parts = [make_experts(range(rank * size, (rank + 1) * size)) for rank in range(num_ranks)]
    assert torch.equal(torch.cat([part.up for part in parts]), whole.up)
    assert torch.equal(torch.cat([part.down for part in parts]), whole.down)


def test_experts_layers_and_seeds_start_apart() -> None:
    up = make_experts(range(2)).up
    others = [up[1], make_experts(range(1), layer=2).up[0], make_experts(range(1), seed=1).up[0]]
    assert all((up[0] - other).abs().mean() > 0.1 for other in others)


def test_weights_start_with_their_standard_deviations() -> None:
    experts = make_experts(range(64))
    assert experts.up.std().item() == pytest.approx(0.4, rel=0.02)
    assert experts.down.std().item() == pytest.approx(0.2, rel=0.02)


@pytest.mark.parametrize("init_scale", [None, 0.1])
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("count", [2, 3])
def test_slices_are_of_the_same_start(activation: Activation, count: int, init_scale: float | None) -> None:
    """The gate's rows and the value's are cut alike."""
    whole = make_experts(range(4), activation, init_scale=init_scale)
    size = FFN // count
    for index in range(count):
        part = make_experts(range(1, 3), activation, init_scale=init_scale, cut=Slice(index, count))
        here = range(index * size, (index + 1) * size)
        rows = [*here, *(FFN + row for row in here)] if is_gated(activation) else list(here)
        assert torch.equal(part.up, whole.up[1:3, rows])
        assert torch.equal(part.down, whole.down[1:3][:, :, list(here)])


@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@COUNTS
def test_the_slices_make_up_the_whole(counts: list[int], dtype: torch.dtype, rate: float) -> None:
    """Outputs and the rows' gradients add up, dropout between the products included."""
    num_rows = sum(counts)
    dropout = ExpertDropout(0.0, rate, torch.arange(num_rows) * 7, lambda purpose: len(purpose))

    def run_part(cut: Slice) -> list[Tensor]:
        experts = make_experts(range(4), cut=cut).to(dtype)
        rows_NH = make_hidden(num_rows).to(dtype).requires_grad_()
        output_NH = experts(rows_NH, torch.tensor(counts), dropout if rate else None)
        weight_H = torch.linspace(-1, 2, HIDDEN).to(dtype)
        return [output_NH.detach(), *torch.autograd.grad((output_NH * weight_H).sum(), rows_NH)]

    parts = [run_part(Slice(index, 3)) for index in range(3)]
    for whole, *cut in zip(run_part(Slice()), *parts, strict=True):
        scale = float(whole.abs().max()) if whole.numel() else 0.0
        tolerance = scale * (1e-6 if dtype == torch.float32 else 2e-2)
        torch.testing.assert_close(sum(cut), whole, rtol=0, atol=tolerance)


def test_slices_of_biases_make_up_the_whole() -> None:
    """Each slice adds its columns of the second bias, once in all."""
    counts_E = torch.tensor([3, 0, 2, 4])
    whole = with_biases(make_experts(range(4), "swiglu_clamped", bias=True))
    assert whole.up_bias is not None and whole.down_bias is not None
    half_F, half_H = FFN // 2, HIDDEN // 2
    found = []
    for index in range(2):
        part = make_experts(range(4), "swiglu_clamped", bias=True, cut=Slice(index, 2))
        assert part.up_bias is not None and part.down_bias is not None
        here = slice(index * half_F, (index + 1) * half_F)
        part.up_bias.data = torch.cat([half[:, here] for half in whole.up_bias.data.chunk(2, dim=1)], dim=1)
        part.down_bias.data = whole.down_bias.data[:, index * half_H : (index + 1) * half_H]
        found.append(part(make_hidden(9), counts_E))
    torch.testing.assert_close(sum(found), whole(make_hidden(9), counts_E), rtol=1e-5, atol=1e-5)
    for options, message in (
        (Slice(0, 3), "hidden size 16 does not"),
        (Slice(0, 5), "expert FFN size 24 does not"),
    ):
        with pytest.raises(ValueError, match=f"{message} divide over {options.count} slices"):
            make_experts(range(1), bias=True, cut=options)
