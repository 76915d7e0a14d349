"""The experts' FFNs as one operation, against their formulas in float64."""

import copy
import ctypes
import threading
import time
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megamoe.kernels.library import Library
from tests.support.kernels.chosen import swiglu_experts, use_compiled
from tests.support.kernels.drawn import assert_all_close_to, assert_close_to, draw

# Rows of each expert, hidden and FFN size.
CASES: dict[str, tuple[list[int], int, int]] = {
    "even": ([32] * 4, 64, 48),
    "uneven": ([5, 170, 1, 330], 40, 24),
    "experts without rows": ([0, 40, 0, 0, 3, 0], 16, 8),
    "no rows": ([0, 0], 16, 8),
    "one row": ([1], 4, 12),
    "around parts": ([63, 64, 65, 128, 129], 20, 36),
    "many experts": ([i % 4 for i in range(80)], 16, 8),
    "one hot expert among many": ([3] * 20 + [900] + [3] * 20, 16, 8),
}

Sides = tuple[Tensor, Tensor, Tensor]
ODD = {"odd sizes": ([13, 0, 50], 17, 33), "one of each": ([1], 1, 1)}  # which PyTorch does not take


def make(counts: list[int], hidden: int, ffn: int) -> Sides:
    """Rows and both weights."""
    shapes = [(sum(counts), hidden), (len(counts), 2 * ffn, hidden), (len(counts), hidden, ffn)]
    rows, up, down = (draw(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes))
    return rows, up, down


TILED: dict[str, tuple[list[int], int, int]] = {  # sizes that AMX takes
    "even": ([32] * 4, 64, 32),
    "uneven": ([5, 170, 1, 330], 32, 96),
    "experts without rows": ([0, 40, 0, 0, 3, 0], 64, 160),
    "no rows": ([0, 0], 32, 32),
    "several panels": ([33, 64], 320, 416),
    "activated in a pass of their own": ([33, 0, 70], 64, 1056),
    "many experts": ([i % 4 for i in range(80)], 32, 64),
}


def exact(counts: list[int], sides: Sides, sent: Tensor) -> list[Tensor]:
    """Output and gradients; of SwiGLU, g s(g) v: s(g) (1 + g (1 - s(g))) v by g, and g s(g) by v."""
    rows, up, down = (side.detach().double() for side in sides)
    ends = [sum(counts[:e]) for e in range(len(counts) + 1)]
    outputs, to_rows, to_up, to_down = [], [], [], []
    for e, (first, last) in enumerate(pairwise(ends)):
        x, upstream = rows[first:last], sent[first:last].double()
        gate, value = (x @ up[e].T).chunk(2, dim=-1)
        share = 1 / (1 + (-gate).exp())
        outputs.append((gate * share * value) @ down[e].T)
        inner = upstream @ down[e]
        slope = torch.cat((inner * value * share * (1 + gate * (1 - share)), inner * gate * share), dim=-1)
        to_rows.append(slope @ up[e])
        to_up.append(slope.T @ x)
        to_down.append(upstream.T @ (gate * share * value))
    return [torch.cat(outputs), torch.cat(to_rows), torch.stack(to_up), torch.stack(to_down)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("case", "compiled"),
    [(name, compiled) for name in CASES for compiled in (True, False)] + [(name, True) for name in ODD],
)
def test_the_formulas(case: str, compiled: bool, threads: int) -> None:
    counts, *sizes = (CASES | ODD)[case]
    use_compiled(compiled)
    torch.set_num_threads(threads)
    sides = make(counts, *sizes)
    output = swiglu_experts(*sides, torch.tensor(counts))
    sent = draw(*output.shape, seed=7)
    found = [output, *torch.autograd.grad(output, sides, sent)]
    assert_all_close_to(found, exact(counts, sides, sent), 3e-6)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("case", TILED.values(), ids=TILED)
def test_the_formulas_in_bf16(case: tuple[list[int], int, int], threads: int, library: Library) -> None:
    """The results are equal up to a few roundings of intermediate values, also in a second backward."""
    if not library.has_tiles:
        pytest.skip("the processor has no AMX")
    torch.set_num_threads(threads)
    rows, up, down = (side.detach().bfloat16().requires_grad_() for side in make(*case))
    sides = rows, up, down
    output = swiglu_experts(*sides, torch.tensor(case[0]))
    sent = draw(*output.shape, seed=7).bfloat16()
    first = torch.autograd.grad(output, sides, sent, retain_graph=True)
    again = torch.autograd.grad(output, sides, sent)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    for one, other in zip([output, *first], exact(case[0], sides, sent), strict=True):
        assert one.dtype == torch.bfloat16
        assert_close_to(one, other, 2.0**-6)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_only_the_gradients_that_are_wanted(wanted: tuple[int, ...], library: Library | None) -> None:
    counts = [5, 0, 9]
    sides = make(counts, 16, 8)
    for place, side in enumerate(sides):
        side.requires_grad_(place in wanted)
    output = swiglu_experts(*sides, torch.tensor(counts))
    sent = draw(*output.shape, seed=7)
    expected = exact(counts, sides, sent)[1:]
    output.backward(sent)
    for place, side in enumerate(sides):
        assert (side.grad is not None) == (place in wanted)
        if side.grad is not None:
            assert_close_to(side.grad, expected[place], 3e-6)


def test_the_graph_can_be_gone_back_through_again(library: Library | None) -> None:
    counts = [50, 0, 90]
    sides = make(counts, 16, 8)
    output = swiglu_experts(*sides, torch.tensor(counts))
    for seed in range(3):
        sent = draw(*output.shape, seed=seed)
        found = torch.autograd.grad(output, sides, sent, retain_graph=True)
        assert_all_close_to(found, exact(counts, sides, sent)[1:], 3e-6)


@pytest.mark.usefixtures("two_threads")
def test_weights_wait_for_all_rows(library: Library) -> None:
    """The backward pass's first product is slow: the other thread comes to the weights' gradients early."""
    sides = make([64], 16, 8)
    output = swiglu_experts(*sides, torch.tensor([64]))
    sent = draw(*output.shape, seed=7)
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 13)
    assert library.sgemm is not None
    multiply = kind(library.sgemm)
    callers: list[int] = []

    def slowly_at_first(*arguments: int) -> None:
        callers.append(threading.get_ident())
        if len(callers) == 1:
            time.sleep(0.3)
        multiply(*arguments)

    slow = kind(slowly_at_first)
    address = ctypes.cast(slow, ctypes.c_void_p).value
    output.grad_fn.library = slow_library = copy.copy(library)
    slow_library.sgemm = address
    found = torch.autograd.grad(output, sides, sent)
    assert len(set(callers)) == 2
    assert_all_close_to(found, exact([64], sides, sent)[1:], 3e-6)


def test_it_keeps_one_product(library: Library) -> None:
    counts = [50, 90]
    sides = make(counts, 16, 8)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)), lambda t: t):
        swiglu_experts(*sides, torch.tensor(counts))
    assert sorted(kept) == sorted([*(tuple(side.shape) for side in sides), (2,), (140, 16)])


def test_a_gradient_that_is_not_contiguous(library: Library) -> None:
    sides = make([3, 4], 16, 8)
    output = swiglu_experts(*sides, torch.tensor([3, 4]))
    sent = draw(16, 7).T
    found = torch.autograd.grad(output, sides, sent)
    assert_all_close_to(found, exact([3, 4], sides, sent)[1:], 3e-6)


@pytest.mark.parametrize(
    ("shapes", "counts"),
    [
        (((7, 16), (2, 16, 15), (2, 16, 8)), [3, 4]),
        (((7, 16), (2, 16, 16), (2, 16, 9)), [3, 4]),
        (((7, 16), (2, 16, 16), (3, 16, 8)), [3, 4]),
        (((7, 16), (2, 16, 16), (2, 16, 8)), [3, 3]),
        (((7, 16), (2, 16, 16), (2, 16, 8)), [3, 4, 0]),
    ],
    ids=["up", "down", "experts", "rows", "counts"],
)
def test_what_does_not_fit(shapes: tuple[tuple[int, ...], ...], counts: list[int], compiled: bool) -> None:
    with pytest.raises(ValueError, match="found"):
        rows, up, down = map(torch.zeros, shapes)
        swiglu_experts(rows, up, down, torch.tensor(counts))
