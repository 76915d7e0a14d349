"""Which implementation of the passes a model uses: a value made from the configuration and passed to them."""

import importlib.util
import os
import shutil
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, Union, cast

import torch
from torch import Tensor

from megamoe.kernels.library import SUFFIXES, Library, find_library

if TYPE_CHECKING:
    from megamoe.kernels.triton import TritonKernels


# The passes over rows that both have, as typed methods of equal arguments.
RowKernels: TypeAlias = Union[Library, "TritonKernels"]


class ModelKeys(Protocol):
    """The two keys of the section `model` that choose."""

    @property
    def cpu_kernels(self) -> str: ...
    @property
    def gpu_kernels(self) -> str: ...


@dataclass(frozen=True)
class Kernels:
    """The choice of kernels of one model. Two models of a process may differ in it.

    compiled: the compiled library for tensors on the CPU, where it can be built. triton: Triton's kernels for
    tensors on CUDA; the first pass that needs them imports triton. triton_products: also for the experts'
    grouped products that PyTorch computes without a loop on the host. Everything else is done by PyTorch's
    operators.
    """

    compiled: bool = True
    triton: bool = False
    triton_products: bool = False

    @classmethod
    def of(cls, model: ModelKeys) -> "Kernels":
        """Return what `model.cpu_kernels` and `model.gpu_kernels` of the configuration choose."""
        asked = model.gpu_kernels
        triton = asked == "triton" or (asked == "auto" and triton_problem() == "")
        return cls(model.cpu_kernels != "plain", triton, triton_products=asked == "triton")

    def library_on(self, device: torch.device) -> Library | None:
        """Return the compiled library if it is chosen, can be built, and the device is the CPU; else None."""
        return find_library()[0] if device.type == "cpu" and self.compiled else None

    def library_for(self, *tensors: Tensor) -> Library | None:
        """Return the library if it supports these tensors: on the CPU, contiguous, of one supported dtype.

        Else None.
        """
        dtype = tensors[0].dtype
        fits = dtype in SUFFIXES and all(each.dtype == dtype and each.is_contiguous() for each in tensors)
        return self.library_on(tensors[0].device) if fits else None

    def uses_triton(self, device: torch.device) -> bool:
        """Return whether Triton's kernels are chosen and the device is a CUDA device."""
        return device.type == "cuda" and self.triton

    def triton_for(self, rows: Tensor) -> "TritonKernels | None":
        """Return Triton's kernels if they are chosen and support these rows, which must be contiguous."""
        found = self.rows_for(rows) if self.uses_triton(rows.device) else None
        return cast("TritonKernels | None", found)

    def rows_on(self, device: torch.device) -> RowKernels | None:
        """Return the kernels of passes over rows on that device, or None for PyTorch's operators."""
        return _triton_kernels() if self.uses_triton(device) else self.library_on(device)

    def rows_for(self, rows: Tensor) -> RowKernels | None:
        """Return the kernels for rows if they support these, which must be contiguous; else None."""
        found = self.rows_on(rows.device)
        fits = found is not None and rows.dtype in found.dtypes and rows.is_contiguous()
        return found if fits else None

    def use_triton_grouped_gemm(self, rows: Tensor, num_experts: int) -> bool:
        """Return whether Triton's kernels multiply these rows of so many experts by their weights."""
        if not self.uses_triton(rows.device):
            return False
        of_torch = num_experts <= MOST_GROUPS and has_grouped_product(rows.dtype, rows.device)
        return self.triton_products or not of_torch


@cache
def _triton_kernels() -> "TritonKernels":
    from megamoe.kernels.triton import TritonKernels

    return TritonKernels()


DEFAULT_KERNELS = Kernels()
# Major compute capabilities for which PyTorch's grouped product has a kernel; not 12 (RTX 50, DGX Spark).
GROUPED_CAPABILITIES = (9, 10)
MOST_GROUPS = 1023  # of that kernel
NO_COMPILER = "triton needs a C compiler, and found neither gcc nor clang"


@cache
def has_grouped_product(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether PyTorch's grouped product reads the row counts on that CUDA device.

    Otherwise it copies them to the host and loops over the experts.
    """
    known = dtype == torch.bfloat16 and torch.cuda.is_available() and torch.version.hip is None
    return known and torch.cuda.get_device_capability(device)[0] in GROUPED_CAPABILITIES


@cache
def triton_problem() -> str:
    """Return why this process cannot use Triton, or an empty string if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    # What Triton's `runtime/build.py` calls: $CC as the name of one program, else one of two.
    asked = os.environ.get("CC")
    if not any(map(shutil.which, [asked] if asked else ["gcc", "clang"])):
        return f"triton needs a C compiler, and found no {asked!r} (CC)" if asked else NO_COMPILER
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    header = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    if not header.is_file():
        return f"triton needs the headers of Python, and {header} is missing (Debian: python3-dev)"
    return ""
