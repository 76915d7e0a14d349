"""Checks of Triton's grouped products and experts in its interpreter; triton_checks.py runs them."""

import tempfile
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from megamoe.kernels.experts.ffn import plain_swiglu_experts, swiglu_experts
from megamoe.kernels.operators import cost_of
from megamoe.kernels.triton import TritonKernels, experts, products
from tests.kernels import test_experts, test_products
from tests.support.kernels.drawn import assert_all_close_to, assert_close_to, assert_one_rounding, draw
from tests.support.kernels.interpreted import ON_TRITON, TOLERANCES, on_triton, programs_from, sparse

TRITON: Any = TritonKernels()
# Rows of each expert, input and output sizes. The tiles on CPU tensors are 32 x 32, 16 deep.
CASES: dict[str, tuple[list[int], int, int]] = {
    "uneven, no multiple of a tile": ([5, 35, 1], 33, 34),
    "experts without rows": ([0, 0, 33, 0, 3, 0], 16, 8),
    "no rows": ([0, 0, 0], 16, 24),
    "one of each": ([1], 1, 1),
    "tiles": ([64], 32, 32),
    "more tiles of rows than go through the columns together": ([293, 0, 40], 16, 40),
}
# In the other dtypes, which the interpreter computes in fp32 all the same.
CASE_AND_DTYPES = [(case, torch.float32) for case in CASES if "go through" not in case]
CASE_AND_DTYPES += [("experts without rows", torch.bfloat16), ("one of each", torch.float16)]
OF_EXPERTS = [("no rows", torch.float32), ("experts without rows", torch.bfloat16)]
EVERY_CASE = [(case, dtype) for case in CASES for dtype in TOLERANCES]


def check_grouped_products(cases: list[tuple[str, torch.dtype]] = CASE_AND_DTYPES) -> None:
    """Forward and both gradients against a loop in float64."""
    for case, dtype in cases:
        inputs, counts = test_products.make(*CASES[case], dtype), CASES[case][0]
        with on_triton():
            found = test_products.run(*inputs, counts)
        for one, other in zip(found, test_products.exact(*inputs, counts), strict=True):
            assert one.dtype == dtype, case
            assert_one_rounding(one, other)


@triton.jit
def _found(ends, experts, columns, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    expert, first, rows, left = products.find_rows(ends, experts, columns, 4, ROWS, COLUMNS)
    place = out + 4 * tl.program_id(0)
    tl.store(place, expert)
    tl.store(place + 1, first)
    tl.store(place + 2, rows)
    tl.store(place + 3, left)


def check_tiles_of_rows_go_together() -> None:
    """Eight tiles of rows of an expert take a tile of columns, then the next; each tile has one program."""
    counts, columns, size = [37, 0, 150, 3], 50, 16
    expected = []
    for expert, count in enumerate(counts):
        begin, tiles = sum(counts[:expert]), -(-count // size)
        for group in range(0, tiles, 8):
            for left in range(0, columns, size):
                for tile in range(group, min(group + 8, tiles)):
                    rows = min(size, count - tile * size)
                    expected.append([expert, begin + tile * size, rows, left])
    programs = len(expected) + 8
    out = torch.zeros(programs, 4, dtype=torch.int64)
    ends = torch.tensor(counts).cumsum(0)
    _found[(programs,)](ends, 4, columns, out, ROWS=size, COLUMNS=size)
    assert out[: len(expected)].tolist() == expected
    assert (out[len(expected) :, 0] == 4).all()


def check_every_grouped_product() -> None:
    check_grouped_products(EVERY_CASE)


def check_experts(cases: list[tuple[str, torch.dtype]] = OF_EXPERTS) -> None:
    """SwiGLU beside the products, with gradients, against the formula in float64."""
    for case, dtype in cases:
        counts, drawn = CASES[case][0], test_experts.make(*CASES[case])
        rows, up, down = (side.detach().to(dtype).requires_grad_() for side in drawn)
        sides = rows, up, down
        output = swiglu_experts(*sides, torch.tensor(counts), ON_TRITON)
        sent = draw(*output.shape, seed=7).to(dtype)
        found = [output, *torch.autograd.grad(output, sides, sent)]
        # What lies between the products is rounded too, so the result is not exact to one rounding.
        tolerance = TOLERANCES[dtype] * (1 if dtype == torch.float32 else 4)
        assert_all_close_to(found, test_experts.exact(counts, sides, sent), tolerance)


def check_every_expert() -> None:
    check_experts(EVERY_CASE)


def check_weighted_experts(cases: list[tuple[str, torch.dtype]] = OF_EXPERTS) -> None:
    """Weights inside, in one pass and in three steps: outputs and gradients are those of weights outside."""
    for case, dtype in cases:
        counts, drawn = CASES[case][0], test_experts.make(*CASES[case])
        sides = [side.detach().to(dtype).requires_grad_() for side in drawn]
        weight_N = (draw(sum(counts), 1, seed=9)[:, 0] + 1.5).requires_grad_()
        sent = draw(*sides[0].shape, seed=7).to(dtype)
        wide = [side.detach().double().requires_grad_() for side in (*sides, weight_N)]
        outputs = []
        for rows, up, down in zip(wide[0].split(counts), wide[1], wide[2], strict=True):
            gate, value = (rows @ up.T).chunk(2, dim=-1)
            outputs.append((functional.silu(gate) * value) @ down.T)
        outside = torch.cat(outputs) * wide[3][:, None]
        expected = [outside, *torch.autograd.grad(outside, wide, sent.double())]
        rows, up, down = sides
        for compute in (swiglu_experts, plain_swiglu_experts):
            output = compute(rows, up, down, torch.tensor(counts), ON_TRITON, None, weight_N)
            found = [output, *torch.autograd.grad(output, (*sides, weight_N), sent)]
            tolerance = TOLERANCES[dtype] * (2 if dtype == torch.float32 else 6)
            assert_all_close_to(found, expected, tolerance)


def check_every_weighted_expert() -> None:
    check_weighted_experts(EVERY_CASE)


def check_the_graph_can_be_gone_back_through_again() -> None:
    with on_triton():
        test_experts.test_the_graph_can_be_gone_back_through_again(None)


def check_experts_are_the_three_steps() -> None:
    """To the bit in bf16: what is rounded between the steps is rounded within the kernels too."""
    counts = [5, 0, 40]
    sides = [draw(45, 24), draw(3, 32, 24, seed=1), draw(3, 24, 16, seed=2)]
    rows, up, down = (side.bfloat16() for side in sides)
    found, steps = (
        compute(rows, up, down, torch.tensor(counts), ON_TRITON)
        for compute in (swiglu_experts, plain_swiglu_experts)
    )
    assert torch.equal(found, steps)


def check_only_the_gradients_that_are_wanted() -> None:
    for wanted in ((0,), (1,), (2,), (0, 2)):
        with on_triton():
            test_experts.test_only_the_gradients_that_are_wanted(wanted, None)


def check_the_host_never_reads_the_counts() -> None:
    """Every way that a tensor's value reaches Python raises."""
    counts = torch.tensor([3, 0, 4])
    sides = [draw(7, 16), draw(3, 16, 16, seed=1), draw(3, 16, 8, seed=2)]
    read = AssertionError("the host read a tensor")
    hidden, active, output = torch.empty(7, 16), torch.empty(7, 8), torch.empty(7, 16)
    launched: list[str] = []

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> "Launch":
            launched.append(str(grid))
            return self

        def __call__(self, *arguments: object, **options: object) -> None: ...

    names = [(products, "_product"), (products, "_to_weight"), (experts, "_up"), (experts, "_down_backward")]
    patched: list[Any] = [mock.patch.object(module, name, Launch()) for module, name in names]
    patched += [
        mock.patch.object(Tensor, name, side_effect=read) for name in ("item", "tolist", "cpu", "__int__")
    ]
    for each in patched:
        each.start()
    arguments = (*sides, counts.cumsum(0), 3, 16, 8, hidden, active)
    TRITON.experts(*arguments, output)
    gradients = [torch.empty_like(side) for side in sides]
    TRITON.experts_backward(output, *arguments, *gradients)
    for each in patched:
        each.stop()
    assert len(launched) == 6


def check_more_than_two_billion_numbers() -> None:
    """Rows, results and weights beyond 2^31 numbers, in files that are holes but for a few of them.

    With offsets of 32 bits each address would be that of another row or expert, which is 0.
    """
    # A multiple of eight tiles: the last tile is alone in its group, whose programs go through the columns.
    width, row = 2**10, 2**21 + 8 * 32
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
            experts._up[(1,)](narrow, both, ends, 1, 32, width // 2, wide, half, None, EXPERTS=1, **tile)
        gate, value = (narrow[row:].double() @ both[0].double().T).chunk(2, dim=1)
        assert_close_to(wide[row:, :32], gate[:, :32], 3e-6)
        assert_close_to(half[row:, :32], (functional.silu(gate) * value)[:, :32], 3e-6)
        with programs_from(row // 32 * 16):
            arguments = (narrow, draw(1, 32, width // 2, seed=4), ends, 1, 32, width // 2)
            experts._down_backward[(1,)](*arguments, wide, half, None, None, EXPERTS=1, **tile)
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


def check_a_weight_gradient_of_late_rows() -> None:
    """The second expert's rows, and its gradient, begin beyond 2^31 numbers."""
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


def check_operators_on_fake_tensors() -> None:
    """A simulation sees each launch, its FLOPs and its bytes, and runs none."""
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
        TRITON.experts(*arguments, output)
        gradients = [torch.empty_like(side) for side in sides]
        TRITON.experts_backward(output, *arguments, *gradients)
    product = 2 * rows * hidden_size * ffn_size
    assert [flops for flops, _ in costs.values()] == [3 * product, 6 * product]
    weights, wide, narrow = 3 * experts * hidden_size * ffn_size, rows * hidden_size, rows * ffn_size
    assert next(iter(costs.values()))[1] == 2 * (weights + 2 * wide + 4 * narrow) + 8 * experts
