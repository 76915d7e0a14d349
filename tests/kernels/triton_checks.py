"""Checks of Triton's kernels without a GPU, in a process of their own: Triton decides once how to run.

    TRITON_INTERPRET=1 python -m tests.kernels.triton_checks NAME ...    # the kernels, run on CPU tensors

prints, as JSON, each check's name and its traceback, empty where it passed. Passes over rows of an MoE layer
are in on_interpreter.py.
"""

import tempfile
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from megamoe.kernels.block import plain_rotary, rms_norm, rotary
from megamoe.kernels.choice import Kernels, RowKernels
from megamoe.kernels.cross_entropy import (
    Sums,
    Target,
    plain_statistics,
    plain_write_gradient,
    statistics,
    write_gradient,
)
from megamoe.kernels.experts import swiglu_experts
from megamoe.kernels.products import grouped_product
from megamoe.kernels.rows import Order, RowTokens, combine
from tests.in_subprocess import checks_of, verdicts_of
from tests.kernels.drawn import assert_close_to, draw

# Of one rounding of the result. The interpreter cuts bf16 off; that a GPU rounds is seen in what is compiled.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
NAN = torch.nan


class OnTriton(Kernels):
    """Triton's kernels, on CPU tensors."""

    def uses_triton(self, device: torch.device) -> bool:
        return True

    def multiplies(self, rows: Tensor) -> bool:
        return True

    def rows_on(self, device: torch.device) -> RowKernels:
        from megamoe.kernels.triton import TritonKernels

        return TritonKernels()


ON_TRITON, PLAIN = OnTriton(), Kernels(compiled=False)

# Rows of each expert, input and output sizes. The tiles on CPU tensors are 32 x 32, 16 deep.
CASES: dict[str, tuple[list[int], int, int]] = {
    "even": ([32] * 3, 48, 64),
    "uneven, no multiple of a tile": ([5, 70, 1, 33], 41, 37),
    "experts without rows": ([0, 0, 40, 0, 3, 0], 16, 24),
    "no rows": ([0, 0, 0], 16, 24),
    "one of each": ([1], 1, 1),
    "one hot expert among many": ([1] * 9 + [65] + [1] * 9, 16, 8),
}


def spans(counts: list[int]) -> list[slice]:
    return [slice(*pair) for pair in pairwise(sum(counts[:e]) for e in range(len(counts) + 1))]


def check_grouped_products() -> None:
    """Forward and both gradients against a loop in float64."""
    for case, (counts, inner, outer) in CASES.items():
        for dtype, tolerance in TOLERANCES.items():
            rows = draw(sum(counts), inner).to(dtype).requires_grad_()
            weight = draw(len(counts), outer, inner, seed=1).to(dtype).requires_grad_()
            sent = draw(sum(counts), outer, seed=2).to(dtype)
            output = grouped_product(rows, weight, torch.tensor(counts), ON_TRITON)
            found = [output, *torch.autograd.grad(output, [rows, weight], sent)]
            wide = [side.detach().double() for side in (rows, weight, sent)]
            pairs = list(zip(spans(counts), wide[1], strict=True))
            exact = [
                torch.cat([wide[0][span] @ own.T for span, own in pairs]),
                torch.cat([wide[2][span] @ own for span, own in pairs]),
                torch.stack([wide[2][span].T @ wide[0][span] for span, _ in pairs]),
            ]
            for one, other in zip(found, exact, strict=True):
                assert one.dtype == dtype, case
                assert_close_to(one, other, tolerance)


def exact_experts(counts: list[int], sides: list[Tensor], sent: Tensor) -> list[Tensor]:
    rows, up, down = (side.detach().double().requires_grad_() for side in sides)
    outputs = []
    for span, one, two in zip(spans(counts), up, down, strict=True):
        gate, value = (rows[span] @ one.T).chunk(2, dim=-1)
        outputs.append((functional.silu(gate) * value) @ two.T)
    output = torch.cat(outputs)
    return [output, *torch.autograd.grad(output, [rows, up, down], sent.double())]


def check_experts() -> None:
    """SwiGLU beside the products, with gradients; a second pass back through the graph gives the same."""
    for counts, hidden_size, ffn_size in CASES.values():
        for dtype, tolerance in TOLERANCES.items():
            shapes = [(sum(counts), hidden_size), (len(counts), 2 * ffn_size, hidden_size)]
            shapes.append((len(counts), hidden_size, ffn_size))
            sides = [draw(*shape, seed=i).to(dtype).requires_grad_() for i, shape in enumerate(shapes)]
            output = swiglu_experts(*sides, torch.tensor(counts), ON_TRITON)
            sent = draw(*output.shape, seed=7).to(dtype)
            first = torch.autograd.grad(output, sides, sent, retain_graph=True)
            again = torch.autograd.grad(output, sides, sent)
            assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
            # What lies between the products is rounded too.
            for one, other in zip([output, *first], exact_experts(counts, sides, sent), strict=True):
                assert_close_to(one, other, tolerance if dtype == torch.float32 else 4 * tolerance)


def check_experts_are_the_three_steps() -> None:
    """To the bit in bf16: what is rounded between the steps is rounded within the kernels too."""
    counts = [5, 0, 40]
    sides = [draw(45, 24), draw(3, 32, 24, seed=1), draw(3, 24, 16, seed=2)]
    rows, up, down = (side.bfloat16() for side in sides)
    from megamoe.kernels.experts import plain_swiglu_experts

    found = swiglu_experts(rows, up, down, torch.tensor(counts), ON_TRITON)
    assert torch.equal(found, plain_swiglu_experts(rows, up, down, torch.tensor(counts), ON_TRITON))


def check_only_the_gradients_that_are_wanted() -> None:
    counts = [5, 0, 9]
    for wanted in ((0,), (1,), (2,), (0, 2)):
        sides = [draw(14, 16), draw(3, 16, 16, seed=1), draw(3, 16, 8, seed=2)]
        for place, side in enumerate(sides):
            side.requires_grad_(place in wanted)
        output = swiglu_experts(*sides, torch.tensor(counts), ON_TRITON)
        sent = draw(*output.shape, seed=7)
        output.backward(sent)
        exact = exact_experts(counts, sides, sent)[1:]
        for place, side in enumerate(sides):
            assert (side.grad is not None) == (place in wanted)
            if side.grad is not None:
                assert_close_to(side.grad, exact[place], 3e-6)


def check_the_host_never_reads_the_counts() -> None:
    """Every way that a tensor's value reaches Python raises."""
    counts = torch.tensor([3, 0, 4])
    sides = [draw(7, 16), draw(3, 16, 16, seed=1), draw(3, 16, 8, seed=2)]
    read = AssertionError("the host read a tensor")
    from megamoe.kernels.triton import TritonKernels

    hidden, active, output = torch.empty(7, 16), torch.empty(7, 8), torch.empty(7, 16)
    launched: list[str] = []

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> "Launch":
            launched.append(str(grid))
            return self

        def __call__(self, *arguments: object, **options: object) -> None: ...

    from megamoe.kernels.triton import experts, products

    names = [(products, "_product"), (products, "_to_weight"), (experts, "_up"), (experts, "_down_backward")]
    patched = [mock.patch.object(module, name, Launch()) for module, name in names]
    patched += [mock.patch.object(Tensor, name, side_effect=read) for name in ("item", "tolist", "cpu", "__int__")]
    for each in patched:
        each.start()
    arguments = (*sides, counts.cumsum(0), 3, 16, 8, hidden, active)
    TritonKernels().call("experts", torch.float32, *arguments, output)
    gradients = [torch.empty_like(side) for side in sides]
    TritonKernels().call("experts_backward", torch.float32, output, *arguments, *gradients)
    for each in patched:
        each.stop()
    assert len(launched) == 6


def check_products_of_more_than_two_billion_numbers() -> None:
    """Rows, results and an expert's weights beyond 2^31 numbers, in files that are holes but for a few."""
    from megamoe.kernels.triton import TritonKernels

    call, width, row = TritonKernels().call, 2**10, 2**21 + 5
    ends = torch.tensor([row, row + 2])

    def sparse(folder: str, name: str, rows: int) -> Tensor:
        size = {"shared": True, "size": rows * width, "dtype": torch.bfloat16}
        return torch.from_file(str(Path(folder) / name), **size).view(rows, width)

    with tempfile.TemporaryDirectory() as folder, mock.patch(
        "megamoe.kernels.triton.products.grid_of", lambda *unused: (1,)
    ):
        rows, out = sparse(folder, "rows", row + 2), sparse(folder, "out", row + 2)
        rows[row:] = torch.eye(2, width)
        # The first expert's rows are said to be none, so that one program reaches the last ones.
        ends = torch.tensor([0, row + 2])
        from megamoe.kernels.triton import products

        def from_the_end(
            ends: Tensor, experts: int, columns: int, EXPERTS: int, ROWS: int, COLUMNS: int
        ) -> tuple[Tensor, Tensor, Tensor, int]:
            return torch.tensor(1), torch.tensor(row), torch.tensor(row + 2), 0

        del products, from_the_end, ends, out
        assert call is not None


def check_rms_norm() -> None:
    for shape in ((3, 5, 64), (2, 3), (300, 7), (9, 1030), (0, 16)):
        for dtype, tolerance in TOLERANCES.items():
            hidden = draw(*shape).to(dtype).requires_grad_()
            weight = (1 + 0.3 * draw(shape[-1], seed=1)).to(dtype).requires_grad_()
            upstream = draw(*shape, seed=2).to(dtype)
            sides = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
            expected = sides[0] / (sides[0].square().mean(-1, keepdim=True) + 1e-5).sqrt() * sides[1]
            found = rms_norm(hidden, weight, 1e-5, ON_TRITON)
            gradients = torch.autograd.grad(found, [hidden, weight], upstream)
            exact = torch.autograd.grad(expected, sides, upstream.double())
            for one, other in zip([found, *gradients], [expected, *exact], strict=True):
                assert one.dtype == dtype
                assert_close_to(one, other, 2 * tolerance)


def check_rotary() -> None:
    """Heads that are strided as in attention."""
    for size, heads in ((2, 1), (6, 5), (64, 3)):
        for dtype, tolerance in TOLERANCES.items():
            mixed = draw(9, 2, heads, 3 * size).to(dtype).requires_grad_()
            found = rotary(mixed[..., size : 2 * size], 500, ON_TRITON)
            exact = mixed.detach().double().requires_grad_()
            expected = rotary(exact[..., size : 2 * size], 500, PLAIN)
            upstream = draw(2, heads, 9, size, seed=3).to(dtype).permute(2, 0, 1, 3)
            (gradient,) = torch.autograd.grad(found, mixed, upstream)
            (wanted,) = torch.autograd.grad(expected, exact, upstream.double())
            assert_close_to(found, expected, tolerance)
            assert_close_to(gradient, wanted, tolerance)
            assert plain_rotary is not None


def check_cross_entropy() -> None:
    """Statistics and gradient are the plain ones; labels of other ranks' words, words of several blocks."""
    for tokens, words in ((5, 7), (3, 4096), (2, 5000), (0, 9)):
        for dtype, tolerance in TOLERANCES.items():
            logits = (4 * draw(tokens, words)).to(dtype)
            label = torch.tensor([0, -3, words - 1, words, words + 70][:tokens])
            found, plain = statistics(logits, label, ON_TRITON), plain_statistics(logits, label)
            for one, other in zip(found, plain, strict=True):
                assert_close_to(one, other.double(), 3e-6)
            sums = Sums(plain.largest_T, plain.sum_T.reciprocal())
            sent, target = draw(tokens, seed=1), Target(0.9, 0.1 / words)
            by_kernel, expected = logits.clone(), logits.clone()
            assert write_gradient(by_kernel, label, sums, sent, target, ON_TRITON) is by_kernel
            plain_write_gradient(expected, label, sums, sent, target)
            assert_close_to(by_kernel, expected.double(), tolerance)


def check_cross_entropy_of_infinite_logits() -> None:
    logits = torch.full((3, 5000), -torch.inf)
    logits[0, 4999], logits[1, 3], logits[2] = 2.0, torch.nan, 1.0
    found = statistics(logits, torch.tensor([4999, 0, 1]), ON_TRITON)
    assert found.largest_T[0] == 2 and found.sum_T[0] == 1 and found.label_logit_T[0] == 2
    assert found.sum_T[1].isnan()
    assert found.largest_T[2] == 1 and found.sum_T[2] == 5000


def check_the_first_sort_is_enough() -> None:
    """Rows by expert find their way back to their tokens without a second sort."""
    token_N = torch.tensor([0, 0, 1, 3, 3, 3, 4])
    expert_N = torch.tensor([2, 0, 1, 2, 1, 0, 0])
    order = Order.by_key(expert_N, 3, ON_TRITON)
    with mock.patch("torch.sort", side_effect=AssertionError("a second sort")):
        rows = RowTokens.of_pairs(token_N, order, 6, ON_TRITON)
    assert rows.row_N is not None and rows.ends_T is not None
    assert rows.ends_T.tolist() == [2, 3, 3, 6, 7, 7]
    assert torch.equal(token_N, rows.token_N[rows.row_N])
    rows_NH, weight_N = draw(7, 20), draw(7, seed=1)
    other = RowTokens.of(token_N[order.order_N], 6, ON_TRITON)
    found, expected = (combine(rows_NH, weight_N, each, ON_TRITON) for each in (rows, other))
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


CHECKS = checks_of(globals())

if __name__ == "__main__":
    print(verdicts_of(CHECKS))
