"""Triton's kernels on CPU tensors in its interpreter, and what its interpreter needs for that."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder

from megamoe.kernels.choice import Kernels, RowKernels
from megamoe.kernels.triton import TritonKernels

# Of one rounding of the result. The interpreter cuts bf16 off; that a GPU rounds is seen in what is compiled.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


class OnTriton(Kernels):
    """Triton's kernels, on CPU tensors."""

    def uses_triton(self, device: torch.device) -> bool:
        return True

    def use_triton_grouped_gemm(self, rows: Tensor, num_experts: int) -> bool:
        return True

    def rows_on(self, device: torch.device) -> RowKernels:
        from megamoe.kernels.triton import TritonKernels

        return TritonKernels()


ON_TRITON, PLAIN = OnTriton(), Kernels(compiled=False)


@contextmanager
def on_triton() -> Iterator[list[str]]:
    """Inside, every `Kernels` takes CPU tensors to Triton's kernels; give the names of those that ran."""
    names: list[str] = []

    def noting(name: str, launch: Callable[..., None]) -> "staticmethod[..., None]":
        def call(*arguments: Any) -> None:
            names.append(name)
            launch(*arguments)

        return staticmethod(call)

    launchers = {name for name, value in vars(TritonKernels).items() if isinstance(value, staticmethod)}
    passes: dict[str, Any] = {name: noting(name, getattr(TritonKernels, name)) for name in launchers}
    chosen = {name: getattr(OnTriton, name) for name in ("uses_triton", "use_triton_grouped_gemm", "rows_on")}
    with mock.patch.multiple(TritonKernels, **passes), mock.patch.multiple(Kernels, **chosen):
        yield names


@contextmanager
def on_plain() -> Iterator[None]:
    """Inside, every `Kernels` takes rows to PyTorch's operators."""
    with mock.patch.object(Kernels, "rows_on", lambda self, device: None):
        yield


@contextmanager
def programs_from(first: int, axis: int = 0) -> Iterator[None]:
    """The first program of each launch is number `first` of that dimension of the grid."""
    given = InterpreterBuilder.create_get_program_id

    def shifted(self: Any, asked: int) -> Any:
        handle = given(self, asked)
        return interpreter.TensorHandle(handle.data + (first if asked == axis else 0), handle.dtype)

    with mock.patch.object(InterpreterBuilder, "create_get_program_id", shifted):
        yield


def sparse(folder: str, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros in a file that takes no space until it is written to."""
    path, size = str(Path(folder) / name), math.prod(shape)
    return torch.from_file(path, shared=True, size=size, dtype=dtype).view(shape)


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
