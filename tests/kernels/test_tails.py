"""No kernel reads past its inputs: each ends where a page ends, and nobody may read the next one."""

import ctypes
import mmap
import multiprocessing
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megamoe.kernels.library import Library
from tests.support.kernels.chosen import combine, gather, grouped_product, row_tokens, swiglu

DTYPES = [torch.float32, torch.bfloat16]


def at_the_end(*shape: int, dtype: torch.dtype) -> Tensor:
    """Ones. Its memory stays with the process."""
    tensor = torch.ones(shape, dtype=dtype)
    end = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, end + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + end), mmap.PAGESIZE, 0) == 0
    placed = torch.frombuffer(memory, dtype=dtype, count=tensor.numel(), offset=end - tensor.nbytes)
    return placed.view(shape).copy_(tensor)


def multiply(dtype: torch.dtype) -> None:
    for count, in_size, out_size in ((1, 32, 96), (17, 96, 32), (33, 32, 32), (5, 1056, 32), (5, 32, 1056)):
        rows_NI = at_the_end(count, in_size, dtype=dtype).requires_grad_()
        weight_EOI = at_the_end(1, out_size, in_size, dtype=dtype).requires_grad_()
        output_NO = grouped_product(rows_NI, weight_EOI, torch.tensor([count]))
        assert bool((output_NO == in_size).all())
        output_NO.backward(at_the_end(count, out_size, dtype=dtype))


def pass_rows(dtype: torch.dtype) -> None:
    for width in (1, 7, 300):
        rows_NH = at_the_end(3, width, dtype=dtype).requires_grad_()
        weight_N = at_the_end(3, dtype=torch.float32).requires_grad_()
        rows = row_tokens(torch.tensor([1, 0, 1]), 2)
        combine(rows_NH, weight_N, rows).backward(at_the_end(2, width, dtype=dtype))
        hidden_TH = at_the_end(2, width, dtype=dtype).requires_grad_()
        gather(hidden_TH, rows).backward(at_the_end(3, width, dtype=dtype))
        rows_N2F = at_the_end(3, 2 * width, dtype=dtype).requires_grad_()
        swiglu(rows_N2F).backward(at_the_end(3, width, dtype=dtype))


def alone(work: Callable[[torch.dtype], None], dtype: torch.dtype) -> None:
    torch.set_num_threads(1)  # a forked process has no more
    work(dtype)
    os._exit(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("work", [multiply, pass_rows])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_nothing_is_read_past_the_end(
    work: Callable[[torch.dtype], None], dtype: torch.dtype, library: Library
) -> None:
    process = multiprocessing.get_context("fork").Process(target=alone, args=(work, dtype))
    process.start()
    process.join(30)
    assert process.exitcode == 0
