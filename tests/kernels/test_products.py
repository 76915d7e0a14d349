"""The grouped product against a float64 loop over the experts: forward and both gradients."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megamoe.kernels.experts.grouped_gemm import takes_any_count
from megamoe.kernels.library import Library
from tests.support.kernels.chosen import grouped_product, kernels, use_compiled

# Rows of each expert, input and output sizes.
CASES: dict[str, tuple[list[int], int, int]] = {
    "even": ([32] * 4, 64, 96),
    "uneven": ([5, 70, 1, 130], 96, 32),
    "experts without rows": ([0, 40, 0, 0, 3, 0], 32, 64),
    "no rows": ([0, 0, 0], 64, 32),
    "one row": ([1], 32, 32),
    "around a tile": ([31, 32, 33, 16, 17], 96, 96),
    "long rows": ([3, 64, 33], 1056, 32),
    "long gradients": ([3, 64, 33], 96, 1056),
    "parts of a left matrix": ([2, 0, 40, 1] * 4, 32, 1056),
    "many experts": ([i % 4 for i in range(80)], 64, 32),
    "many rows": ([1100], 32, 32),
}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest, library: Library) -> torch.dtype:
    chosen: torch.dtype = request.param
    if chosen == torch.bfloat16 and not library.has_tiles:
        pytest.skip("the processor has no AMX")
    if chosen == torch.float32 and library.sgemm is None:
        pytest.skip("PyTorch shows no BLAS")
    return chosen


def make(counts: list[int], in_size: int, out_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weights and the gradient sent back."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(sum(counts), in_size), (len(counts), out_size, in_size), (sum(counts), out_size)]
    rows_NI, weight_EOI, sent_NO = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return rows_NI.requires_grad_(), weight_EOI.requires_grad_(), sent_NO


def run(rows_NI: Tensor, weight_EOI: Tensor, sent_NO: Tensor, counts: list[int]) -> list[Tensor]:
    output_NO = grouped_product(rows_NI, weight_EOI, torch.tensor(counts))
    return [output_NO, *torch.autograd.grad(output_NO, [rows_NI, weight_EOI], sent_NO)]


def exact(rows_NI: Tensor, weight_EOI: Tensor, sent_NO: Tensor, counts: list[int]) -> list[Tensor]:
    """The formulas, one expert after the other."""
    rows, weight, sent = rows_NI.detach().double(), weight_EOI.detach().double(), sent_NO.double()
    ends = [sum(counts[:e]) for e in range(len(counts) + 1)]
    spans = [slice(*pair) for pair in pairwise(ends)]
    return [
        torch.cat([rows[span] @ own.T for span, own in zip(spans, weight, strict=True)]),
        torch.cat([sent[span] @ own for span, own in zip(spans, weight, strict=True)]),
        torch.stack([sent[span].T @ rows[span] for span in spans]),
    ]


def check(found: list[Tensor], expected: list[Tensor]) -> None:
    """Compare up to one rounding of the result and fp32's rounding of the sum."""
    for one, other in zip(found, expected, strict=True):
        size = other.abs().max().item() if other.numel() else 0.0
        rounding = 2**-8 if one.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(one.double(), other, rtol=rounding, atol=3e-6 * size)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_compiled_equals_a_loop_in_float64(case: tuple[list[int], int, int], dtype: torch.dtype) -> None:
    inputs = make(*case, dtype)
    assert takes_any_count(inputs[0], inputs[1:2], kernels())
    check(run(*inputs, case[0]), exact(*inputs, case[0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["uneven", "experts without rows", "no rows"])
def test_plain_equals_a_loop_in_float64(case: str, dtype: torch.dtype) -> None:
    use_compiled(False)
    inputs = make(*CASES[case], dtype)
    assert not takes_any_count(inputs[0], inputs[1:2], kernels())
    check(run(*inputs, CASES[case][0]), exact(*inputs, CASES[case][0]))


@pytest.mark.parametrize("sizes", [(40, 32), (32, 48)], ids=str)
def test_sizes_that_no_tile_fits(sizes: tuple[int, int]) -> None:
    counts = [3, 0, 33]
    inputs = make(counts, *sizes, torch.bfloat16)
    assert not takes_any_count(inputs[0], inputs[1:2], kernels())
    check(run(*inputs, counts), exact(*inputs, counts))


@pytest.mark.parametrize("sizes", [(1, 1), (7, 13)], ids=str)
def test_any_size_in_fp32(sizes: tuple[int, int]) -> None:
    counts = [3, 0, 33]
    inputs = make(counts, *sizes, torch.float32)
    check(run(*inputs, counts), exact(*inputs, counts))


@pytest.mark.parametrize("case", ["around a tile", "long gradients", "many experts"])
def test_any_number_of_threads_gives_the_same(case: str, dtype: torch.dtype) -> None:
    """The same bits, where the sums are our own; PyTorch's BLAS cuts them by its threads."""
    inputs = make(*CASES[case], dtype)
    found = []
    for number in (1, 2, 2, 3):
        torch.set_num_threads(number)
        found.append(run(*inputs, CASES[case][0]))
    assert all(map(torch.equal, found[1], found[2]))
    for other in found[1:]:
        if dtype == torch.bfloat16:
            assert all(map(torch.equal, found[0], other))
        check(other, [tensor.double() for tensor in found[0]])


def test_one_gradient_alone(dtype: torch.dtype) -> None:
    counts, in_size, out_size = CASES["uneven"]
    rows_NI, weight_EOI, sent_NO = make(counts, in_size, out_size, dtype)
    _, to_rows, to_weight = run(rows_NI, weight_EOI, sent_NO, counts)
    for wanted, expected in ((rows_NI, to_rows), (weight_EOI, to_weight)):
        rows, weight = (side if side is wanted else side.detach() for side in (rows_NI, weight_EOI))
        output_NO = grouped_product(rows, weight, torch.tensor(counts))
        assert torch.equal(torch.autograd.grad(output_NO, wanted, sent_NO)[0], expected)


def test_memory_of_any_layout(dtype: torch.dtype) -> None:
    """A transposed weight, strided rows, and a gradient that is one number in all places."""
    counts, in_size, out_size = CASES["uneven"]
    rows_NI, weight_EOI, _ = make(counts, in_size, out_size, dtype)
    strided = rows_NI.detach().T.contiguous().T.requires_grad_()
    turned = weight_EOI.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    assert not strided.is_contiguous() and not turned.is_contiguous()
    sent_NO = torch.ones((), dtype=dtype).expand(sum(counts), out_size)
    check(run(strided, turned, sent_NO, counts), exact(strided, turned, sent_NO, counts))


def test_second_derivatives_are_refused(dtype: torch.dtype) -> None:
    rows_NI, weight_EOI, _ = make([2, 1], 32, 32, dtype)
    output_NO = grouped_product(rows_NI, weight_EOI, torch.tensor([2, 1]))
    (gradient,) = torch.autograd.grad(output_NO.square().sum(), rows_NI, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("weight", "counts", "message"),
    [
        (torch.zeros(2, 3, 5), [4, 2], "do not fit"),
        (torch.zeros(2, 3, 4, dtype=torch.bfloat16), [4, 2], "do not fit"),
        (torch.zeros(2, 3, 4), [4, 3], "expected those of 6 rows of 2 experts"),
        (torch.zeros(3, 3, 4), [4, 2], "expected those of 6 rows of 3 experts"),
    ],
)
def test_what_does_not_fit_is_not_read(weight: Tensor, counts: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grouped_product(torch.zeros(6, 4), weight, torch.tensor(counts))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_may_begin_anywhere_in_a_larger_tensor(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO 3 gathers several parameters into one; on CUDA PyTorch's product wants multiples of 16 bytes."""
    counts, plain = [3, 0, 5], functional.grouped_mm

    def on_cuda(left: Tensor, right: Tensor, **named: Any) -> Tensor:
        assert left.data_ptr() % 16 == right.data_ptr() % 16 == 0
        return plain(left, right, **named)

    rows_NI, weight_EOI, sent_NO = make(counts, 16, 24, dtype)
    use_compiled(False)
    expected = run(rows_NI, weight_EOI, sent_NO, counts)
    monkeypatch.setattr(functional, "grouped_mm", on_cuda)
    flat = torch.empty(1 + weight_EOI.numel(), dtype=dtype)
    shifted_EOI = flat[1:].view_as(weight_EOI).copy_(weight_EOI.detach()).requires_grad_()
    found = run(rows_NI, shifted_EOI, sent_NO, counts)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
