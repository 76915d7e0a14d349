"""Checks of Triton's kernels without a GPU, in a process of their own: Triton decides once how to run.

    TRITON_INTERPRET=1 python -m tests.kernels.triton_checks NAME ...    # the kernels, run on CPU tensors

prints, as JSON, each check's name and its traceback, empty where it passed. Passes over rows of an MoE layer
are in on_interpreter.py.
"""

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder

from megamoe.kernels.attention import split_heads
from megamoe.kernels.block import rms_norm, rotary, summed_rms_norm, turn_sides
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
from tests.in_subprocess import checks_of, run_checks
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
    "uneven, no multiple of a tile": ([5, 35, 1], 33, 34),
    "experts without rows": ([0, 0, 33, 0, 3, 0], 16, 8),
    "no rows": ([0, 0, 0], 16, 24),
    "one of each": ([1], 1, 1),
    "tiles": ([64], 32, 32),
}
# In the other dtypes, which the interpreter computes in fp32 all the same.
CASE_AND_DTYPES = [(case, torch.float32) for case in CASES]
CASE_AND_DTYPES += [("experts without rows", torch.bfloat16), ("one of each", torch.float16)]
EVERY_CASE = [(case, dtype) for case in CASES for dtype in TOLERANCES]


def spans(counts: list[int]) -> list[slice]:
    return [slice(*pair) for pair in pairwise(sum(counts[:e]) for e in range(len(counts) + 1))]


def check_grouped_products(cases: list[tuple[str, torch.dtype]] = CASE_AND_DTYPES) -> None:
    """Forward and both gradients against a loop in float64."""
    for case, dtype in cases:
        counts, inner, outer = CASES[case]
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
            assert_close_to(one, other, TOLERANCES[dtype])


def check_every_grouped_product() -> None:
    check_grouped_products(EVERY_CASE)


def ffn(sides: list[Tensor], counts: list[int]) -> Tensor:
    rows, up, down = sides
    return swiglu_experts(rows, up, down, torch.tensor(counts), ON_TRITON)


def exact_experts(counts: list[int], sides: list[Tensor], sent: Tensor) -> list[Tensor]:
    rows, up, down = (side.detach().double().requires_grad_() for side in sides)
    outputs = []
    for span, one, two in zip(spans(counts), up, down, strict=True):
        gate, value = (rows[span] @ one.T).chunk(2, dim=-1)
        outputs.append((functional.silu(gate) * value) @ two.T)
    output = torch.cat(outputs)
    return [output, *torch.autograd.grad(output, [rows, up, down], sent.double())]


def check_experts(cases: list[tuple[str, torch.dtype]] = CASE_AND_DTYPES) -> None:
    """SwiGLU beside the products, with gradients, against the formula in float64."""
    for case, dtype in cases:
        counts, hidden_size, ffn_size = CASES[case]
        shapes = [(sum(counts), hidden_size), (len(counts), 2 * ffn_size, hidden_size)]
        shapes.append((len(counts), hidden_size, ffn_size))
        sides = [draw(*shape, seed=i).to(dtype).requires_grad_() for i, shape in enumerate(shapes)]
        output = ffn(sides, counts)
        sent = draw(*output.shape, seed=7).to(dtype)
        found = [output, *torch.autograd.grad(output, sides, sent)]
        # What lies between the products is rounded too.
        tolerance = TOLERANCES[dtype] * (1 if dtype == torch.float32 else 4)
        for one, other in zip(found, exact_experts(counts, sides, sent), strict=True):
            assert_close_to(one, other, tolerance)


def check_every_expert() -> None:
    check_experts(EVERY_CASE)


def check_the_graph_can_be_gone_back_through_again() -> None:
    sides = [draw(7, 8), draw(2, 8, 8, seed=1), draw(2, 8, 4, seed=2)]
    for side in sides:
        side.requires_grad_()
    output = ffn(sides, [3, 4])
    first = torch.autograd.grad(output, sides, output.detach(), retain_graph=True)
    again = torch.autograd.grad(output, sides, output.detach())
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


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
        output = ffn(sides, counts)
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
    patched: list[Any] = [mock.patch.object(module, name, Launch()) for module, name in names]
    patched += [
        mock.patch.object(Tensor, name, side_effect=read) for name in ("item", "tolist", "cpu", "__int__")
    ]
    for each in patched:
        each.start()
    arguments = (*sides, counts.cumsum(0), 3, 16, 8, hidden, active)
    TritonKernels().call("experts", torch.float32, *arguments, output)
    gradients = [torch.empty_like(side) for side in sides]
    TritonKernels().call("experts_backward", torch.float32, output, *arguments, *gradients)
    for each in patched:
        each.stop()
    assert len(launched) == 6


@contextmanager
def programs_from(first: int, axis: int = 0) -> Iterator[None]:
    """The first program of each launch is number `first` of that dimension of the grid."""
    given = InterpreterBuilder.create_get_program_id

    def shifted(self: Any, asked: int) -> Any:
        handle = given(self, asked)
        return interpreter.TensorHandle(handle.data + (first if asked == axis else 0), handle.dtype)

    with mock.patch.object(InterpreterBuilder, "create_get_program_id", shifted):
        yield


def sparse(folder: str, name: str, *shape: int) -> Tensor:
    """fp32 zeros in a file that takes no space until it is written to."""
    path, size = str(Path(folder) / name), math.prod(shape)
    return torch.from_file(path, shared=True, size=size, dtype=torch.float32).view(shape)


def check_more_than_two_billion_numbers() -> None:
    """Rows, results and weights beyond 2^31 numbers, in files that are holes but for a few of them.

    With offsets of 32 bits each address would be that of another row or expert, which is 0.
    """
    from megamoe.kernels.triton import experts, products

    width, row = 2**10, 2**21 + 32  # a multiple of the tile
    tile = {"ROWS": 32, "COLUMNS": 32, "DEPTH": 32, "PRECISION": "ieee"}
    ends = torch.tensor([row + 2])
    with tempfile.TemporaryDirectory() as folder:
        wide, narrow, half = (sparse(folder, str(size), row + 2, size) for size in (width, 32, width // 2))
        wide[row:] = draw(2, width)
        few = wide[row:].clone()
        up, down = draw(1, 32, width, seed=1), draw(1, 32, width, seed=2)
        with programs_from(row // 32):  # one tile across
            products._product[(1,)](
                wide, up, ends, 1, width, 32, narrow, EXPERTS=1, WEIGHT_IS_OUT_IN=True, **tile
            )
        assert_close_to(narrow[row:], few.double() @ up[0].double().T, 3e-6)
        with programs_from(row // 32 * 32):  # of 32 tiles across, the first
            products._product[(1,)](
                narrow, down, ends, 1, 32, width, wide, EXPERTS=1, WEIGHT_IS_OUT_IN=False, **tile
            )
        assert_close_to(wide[row:, :32], narrow[row:].double() @ down[0, :, :32].double(), 3e-6)
        assert torch.equal(wide[row:, 32:], few[:, 32:])
        both = draw(1, width, 32, seed=3)
        with programs_from(row // 32 * 16):
            experts._up[(1,)](narrow, both, ends, 1, 32, width // 2, wide, half, EXPERTS=1, **tile)
        gate, value = (narrow[row:].double() @ both[0].double().T).chunk(2, dim=1)
        assert_close_to(wide[row:, :32], gate[:, :32], 3e-6)
        assert_close_to(half[row:, :32], (functional.silu(gate) * value)[:, :32], 3e-6)
        with programs_from(row // 32 * 16):
            arguments = (narrow, draw(1, 32, width // 2, seed=4), ends, 1, 32, width // 2)
            experts._down_backward[(1,)](*arguments, wide, half, EXPERTS=1, **tile)
        sent = narrow[row:].double() @ draw(1, 32, width // 2, seed=4)[0].double()
        assert_close_to(wide[row:, width // 2 :][:, :32], (sent * functional.silu(gate))[:, :32], 3e-6)
        many, size = 2**13 + 1, 2**9
        weights = sparse(folder, "weights", many, size, size)
        weights[-1] = draw(size, size, seed=3)
        last = torch.zeros(many, dtype=torch.int64)
        last[-1] = 3
        rows, result = draw(3, size, seed=4), torch.zeros(3, size)
        for is_out_in, factor in ((True, weights[-1].T), (False, weights[-1])):
            products._product[(16,)](
                *(rows, weights, last, many, size, size, result),
                WEIGHT_IS_OUT_IN=is_out_in,
                EXPERTS=2**14,
                **tile,
            )
            assert_close_to(result, rows.double() @ factor.double(), 3e-6)


LATE, LATE_WIDTH = 2**21 + 32, 2**10  # a row that begins beyond 2^31 numbers


def check_norms_of_late_rows() -> None:
    """Rows, sums, results and gradients beyond 2^31 numbers; the parts of the weight's gradient too."""
    from megamoe.kernels.triton import norms

    sizes, count = {"ROWS": 2, "BLOCK": LATE_WIDTH}, LATE + 2
    weight, scale = draw(LATE_WIDTH, seed=1), torch.zeros(count)
    with tempfile.TemporaryDirectory() as folder, programs_from(LATE // 2):
        names = ("rows", "added", "sum", "out", "sent", "sent to the sum", "gradient")
        rows, added, total, out, sent, sent_to_sum, to_rows = (
            sparse(folder, name, count, LATE_WIDTH) for name in names
        )
        for seed, each in enumerate((rows, added, sent, sent_to_sum)):
            each[LATE:] = draw(2, LATE_WIDTH, seed=2 + seed)
        norms._rms_norm[(1,)](*(rows, added, weight, count, LATE_WIDTH, 1e-5, total, out, scale), **sizes)
        late = (rows[LATE:] + added[LATE:]).double()
        exact, normed = exact_norm(late, weight.double(), sent[LATE:].double())
        assert torch.equal(total[LATE:], rows[LATE:] + added[LATE:])
        assert_close_to(out[LATE:], normed, 3e-6)
        part = sparse(folder, "parts", LATE // 2 + 1, LATE_WIDTH)
        norms._rms_norm_backward[(1,)](
            *(sent, sent_to_sum, total, weight, scale, count, LATE_WIDTH, to_rows, part), **sizes
        )
        assert_close_to(to_rows[LATE:], exact[0] + sent_to_sum[LATE:].double(), 3e-6)
        assert_close_to(part[-1], exact[1], 3e-6)


def exact_norm(rows: Tensor, weight: Tensor, sent: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """The gradients of rows and weight, and the norm."""
    leaves = [rows.requires_grad_(), weight.requires_grad_()]
    normed = rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    return torch.autograd.grad(normed, leaves, sent), normed.detach()


def check_rotary_of_late_positions() -> None:
    from megamoe.kernels.triton import rotary as launcher

    heads, half = 16, LATE_WIDTH // 32
    strides = (LATE_WIDTH, LATE_WIDTH, 2 * half)  # of positions, of the only sequence, of heads
    with tempfile.TemporaryDirectory() as folder, programs_from(LATE):
        given, out = (sparse(folder, name, LATE + 1, heads, 2 * half) for name in ("given", "out"))
        cosine, sine = (sparse(folder, name, LATE + 1, half) for name in ("cosine", "sine"))
        given[LATE], angle = draw(heads, 2 * half), draw(half, seed=1)
        cosine[LATE], sine[LATE] = angle.cos(), angle.sin()
        arguments = (given, out, cosine, sine, *strides, *strides, 1, heads, half, 1.0)
        launcher._rotate[(1,)](*arguments, HEADS=heads, BLOCK=half)
        first, second = given[LATE].double().chunk(2, dim=-1)
        cos, sin = cosine[LATE].double(), sine[LATE].double()
        expected = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        assert_close_to(out[LATE], expected, 3e-6)


def check_losses_of_late_tokens() -> None:
    """Cross entropy, and the sums over a router's scores."""
    from megamoe.kernels.triton import cross_entropy, router_sums

    tokens, words, experts = LATE + 1, LATE_WIDTH, 512
    label = torch.full((tokens,), 7)
    largest, sums, of_label, totals = (torch.zeros(tokens) for _ in range(4))
    with tempfile.TemporaryDirectory() as folder:
        logits = sparse(folder, "logits", tokens, words)
        logits[LATE] = draw(words)
        own = logits[LATE].double()
        with programs_from(LATE):
            results = (largest, sums, of_label, totals)
            cross_entropy._statistics[(1,)](logits, label, words, *results, BLOCK=words)
            assert largest[LATE] == own.max() and of_label[LATE] == own[7]
            assert_close_to(sums[LATE], (own - own.max()).exp().sum(), 3e-6)
            arguments = (logits, label, largest, 1 / sums, torch.ones(tokens), words, 1.0, 0.0)
            cross_entropy._gradient[(1,)](*arguments, BLOCK=words)
        expected = own.softmax(0)
        expected[7] -= 1
        assert_close_to(logits[LATE], expected, 3e-6)
        tokens = 2 * LATE + 2
        scores, to_scores = (sparse(folder, name, tokens, experts) for name in ("scores", "gradient"))
        scores[2 * LATE :] = draw(2, experts)
        late, log_sum = scores[2 * LATE :].double().requires_grad_(), torch.zeros(tokens)
        part, factor = torch.zeros(tokens), torch.zeros(experts)
        sizes = {"ROWS": 32, "EXPERTS": experts}
        exact = late.logsumexp(-1).square().sum() / tokens
        with programs_from(2 * LATE // 32):
            router_sums._z_loss[(1,)](scores, tokens, experts, log_sum, part, **sizes)
            assert_close_to(part[2 * LATE // 32], exact.detach(), 3e-6)
            router_sums._z_loss_backward[(1,)](
                *(torch.ones(()), scores, log_sum, tokens, experts, to_scores), **sizes
            )
            assert_close_to(to_scores[2 * LATE :], torch.autograd.grad(exact, late)[0], 3e-6)
            counts = torch.arange(experts)
            router_sums._balance_loss[(1,)](scores, counts, tokens, experts, factor, part, **sizes)
        share = experts / tokens * counts.double() / counts.sum()
        assert_close_to(part[2 * LATE // 32], (late.detach() * share).sum(), 1e-5)


def check_a_weight_gradient_of_late_rows() -> None:
    """The second expert's rows, and its gradient, begin beyond 2^31 numbers."""
    from megamoe.kernels.triton import products

    width, row = 2**10, 2**21 + 32
    with tempfile.TemporaryDirectory() as folder:
        rows = sparse(folder, "rows", row + 2, width)
        rows[row:] = draw(2, width)
        ends, out = torch.tensor([row, row + 2]), torch.zeros(2, width, width)
        with programs_from(1, axis=1):
            products._to_weight[(1, 1)](
                *(rows, rows, ends, width, width, out), ROWS=32, COLUMNS=32, DEPTH=32, PRECISION="ieee"
            )
        few = rows[row:, :32].double()
        assert_close_to(out[1, :32, :32], few.T @ few, 3e-6)
        assert not out[0].any()


SHORT_NORMS: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((2, 3, 64), torch.float32),
    ((0, 16), torch.float32),
    ((3, 1030), torch.bfloat16),
    ((5, 7), torch.float16),
]


def check_operators_on_fake_tensors() -> None:
    """A simulation sees each launch, its FLOPs and its bytes, and runs none."""
    from megamoe.kernels.operators import cost_of
    from megamoe.kernels.triton import TritonKernels

    rows, experts, hidden_size, ffn_size = 4096, 8, 1024, 512
    costs: dict[str, tuple[int, int]] = {}

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cost, result = cost_of(func.name().partition(".")[0]), func(*args, **(kwargs or {}))
            if cost is not None:
                assert cost.flops is not None and cost.bytes_moved is not None
                numbers = cost.flops(*args, result=result), cost.bytes_moved(*args, result=result)
                costs[func.name()] = numbers
            return result

    with FakeTensorMode(), Counted():
        shapes = [(rows, hidden_size), (experts, 2 * ffn_size, hidden_size), (experts, hidden_size, ffn_size)]
        sides = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
        ends = torch.empty(experts, dtype=torch.int64)
        hidden, active = (torch.empty(rows, size * ffn_size, dtype=torch.bfloat16) for size in (2, 1))
        arguments = (*sides, ends, experts, hidden_size, ffn_size, hidden, active)
        output = torch.empty_like(sides[0])
        TritonKernels().call("experts", torch.bfloat16, *arguments, output)
        gradients = [torch.empty_like(side) for side in sides]
        TritonKernels().call("experts_backward", torch.bfloat16, output, *arguments, *gradients)
    product = 2 * rows * hidden_size * ffn_size
    assert [flops for flops, _ in costs.values()] == [3 * product, 6 * product]
    weights, wide, narrow = 3 * experts * hidden_size * ffn_size, rows * hidden_size, rows * ffn_size
    assert next(iter(costs.values()))[1] == 2 * (weights + 2 * wide + 4 * narrow) + 8 * experts


def check_rms_norm(cases: list[tuple[tuple[int, ...], torch.dtype]] = SHORT_NORMS) -> None:
    for shape, dtype in cases:
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
            assert_close_to(one, other, 2 * TOLERANCES[dtype])


def check_every_rms_norm() -> None:
    """300 rows of 7 are more than a program holds, and 9,000 more than all programs do at a time."""
    shapes = [(3, 5, 64), (2, 3), (300, 7), (9, 1030), (9000, 100)]
    check_rms_norm([(shape, dtype) for shape in shapes for dtype in TOLERANCES])


def check_a_norm_of_a_sum(cases: list[tuple[tuple[int, ...], torch.dtype]] = SHORT_NORMS) -> None:
    """The sum, its norm and all gradients against the formula in float64; without a summand too."""
    for shape, dtype in cases:
        for has_added in (True, False):
            sides = [draw(*shape), 1 + 0.3 * draw(shape[-1], seed=1), draw(*shape, seed=2)][: 2 + has_added]
            leaves = [side.to(dtype).requires_grad_() for side in sides]
            sent = [draw(*shape, seed=seed).to(dtype) for seed in (3, 4)]
            added = leaves[2] if has_added else None
            found = summed_rms_norm(leaves[0], added, leaves[1], 1e-5, ON_TRITON)
            gradients = torch.autograd.grad(found, leaves, sent)
            wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
            total = wide[0] + wide[2] if has_added else wide[0]
            # What is normed is the rounded sum.
            rounded = total + (total.detach().float().to(dtype).double() - total.detach())
            normed = rounded / (rounded.square().mean(-1, keepdim=True) + 1e-5).sqrt() * wide[1]
            exact = torch.autograd.grad([total, normed], wide, [each.double() for each in sent])
            for one, other in zip([*found, *gradients], [total, normed, *exact], strict=True):
                assert one.dtype == dtype
                # The interpreter cuts the sum off to bf16, where a GPU rounds it.
                assert_close_to(one, other, (2 if dtype == torch.float32 else 4) * TOLERANCES[dtype])


def check_every_norm_of_a_sum() -> None:
    shapes = [(3, 5, 64), (300, 7), (9000, 100)]
    check_a_norm_of_a_sum([(shape, dtype) for shape in shapes for dtype in TOLERANCES])


def check_gradients_of_heads_are_side_by_side() -> None:
    """Of one projection they are its gradient without a copy; heads of several shapes have their own."""
    for size, heads, dtype in ((6, 5, torch.float32), (2, 1, torch.bfloat16)):
        mixed = draw(4, 2, heads, 3 * size).to(dtype).requires_grad_()
        sent = [draw(4, 2, heads, size, seed=seed).to(dtype) for seed in (3, 4, 5)]
        with mock.patch("torch.cat", side_effect=AssertionError("a copy")):
            query, key, value = split_heads(mixed, [size] * 3)
            sides = turn_sides(query, key, value, 500, ON_TRITON)
            (gradient,) = torch.autograd.grad(sides, mixed, sent)
        assert all(side.is_contiguous() for side in sides[:2])
        exact = mixed.detach().double().requires_grad_()
        query, key, value = exact.split(size, dim=-1)
        expected = turn_sides(query, key, value, 500, PLAIN)
        (wanted,) = torch.autograd.grad(expected, exact, [each.double() for each in sent])
        for one, other in zip([*sides, gradient], [*expected, wanted], strict=True):
            assert_close_to(one, other, TOLERANCES[dtype])
    query, key, value = (draw(4, 2, heads, 6).requires_grad_() for heads in (4, 2, 2))
    found, plain = (turn_sides(query, key, value, 500, kernels) for kernels in (ON_TRITON, PLAIN))
    sent = [draw(*side.shape, seed=3) for side in found]
    for one, other in zip(
        *(torch.autograd.grad(s, [query, key, value], sent) for s in (found, plain)), strict=True
    ):
        assert_close_to(one, other.double(), 3e-6)


def check_a_whole_model() -> None:
    """Blocks on Triton's kernels have the loss and all gradients of Megatron-Core's on plain ones."""
    from megamoe.moe.part import StepContext
    from tests.tiny import VOCABULARY, tiny, tiny_gpt, world_of_one

    tokens_BS = torch.arange(16).view(2, 8) * 5 % VOCABULARY
    position_BS = torch.arange(8).expand(2, 8)
    found: list[list[Tensor]] = []
    names: list[str] = []
    with world_of_one():
        for kernels in (ON_TRITON, PLAIN):
            context = StepContext()
            config = tiny(
                "moe.losses={switch_balance: 0.3, z_loss: 0.1}", "moe.router.selector={name: top_k, k: 2}"
            )
            with mock.patch.object(Kernels, "of", lambda *options, kernels=kernels: kernels):
                model = tiny_gpt(config, context)
            with recorded(names):
                losses_BS = model(tokens_BS, position_BS, tokens_BS.roll(-1, 1))
                gradients = torch.autograd.grad(losses_BS.mean(), list(model.parameters()))
            found.append([losses_BS.detach(), *gradients])
    assert names.count("summed_rms_norm") == 2 and names.count("summed_rms_norm_backward") == 4
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


@contextmanager
def recorded(names: list[str]) -> Iterator[None]:
    """The names of the kernels that are launched."""
    from megamoe.kernels.triton import TritonKernels

    given = TritonKernels.call

    def call(self: TritonKernels, name: str, *arguments: Any) -> None:
        names.append(name)
        given(self, name, *arguments)

    with mock.patch.object(TritonKernels, "call", call):
        yield


SHORT_TURNS = [(2, 1, torch.float32), (6, 5, torch.bfloat16)]


def check_rotary(cases: list[tuple[int, int, torch.dtype]] = SHORT_TURNS) -> None:
    """Heads that are strided as in attention."""
    for size, heads, dtype in cases:
        mixed = draw(4, 2, heads, 3 * size).to(dtype).requires_grad_()
        found = rotary(mixed[..., size : 2 * size], 500, ON_TRITON)
        exact = mixed.detach().double().requires_grad_()
        expected = rotary(exact[..., size : 2 * size], 500, PLAIN)
        upstream = draw(2, heads, 4, size, seed=3).to(dtype).permute(2, 0, 1, 3)
        (gradient,) = torch.autograd.grad(found, mixed, upstream)
        (wanted,) = torch.autograd.grad(expected, exact, upstream.double())
        assert_close_to(found, expected, TOLERANCES[dtype])
        assert_close_to(gradient, wanted, TOLERANCES[dtype])


def check_every_rotary() -> None:
    """60 heads of 80 are more than a program holds."""
    sizes = [(2, 1), (6, 5), (64, 3), (80, 60)]
    check_rotary([(size, heads, dtype) for size, heads in sizes for dtype in TOLERANCES])


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


def widened(handle: Any) -> Any:
    """A bf16 operand of tl.dot in fp32."""
    if str(handle.dtype.scalar) != "bf16":
        return handle
    wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, interpreter.tl.float32)


def products_in_bf16() -> None:
    """Triton 3.7's interpreter holds bf16 as 16-bit integers, and multiplies those in tl.dot."""
    given = InterpreterBuilder.create_dot

    def create_dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        return given(self, widened(left), widened(right), *rest)

    InterpreterBuilder.create_dot = create_dot


products_in_bf16()
CHECKS = checks_of(globals())

if __name__ == "__main__":
    print(run_checks(CHECKS))
