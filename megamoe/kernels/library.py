"""The compiled CPU kernels: built once on a machine by its C++ compiler. They are optional.

The library has a C interface for ctypes, so that it needs no PyTorch headers and builds in seconds. It is
cached in $XDG_CACHE_HOME/megamoe (default ~/.cache/megamoe) under a hash of its sources, its compiler and the
processor. A file that another user could have written is not loaded.
"""

import ctypes
import os
import platform
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megamoe.compat.torch_compat import sgemm_address
from megamoe.kernels.build import BuildError, cached, run

SOURCES = Path(__file__).parent / "cpu"
FLAGS = ["-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
FLAGS_OF = {"x86_64": ["-mprefer-vector-width=512"]}  # GCC's default is half of AVX-512's width
BUILD_TIMEOUT_S = 300
WAY_OUT = "take a smaller train.micro_batch_size or data.sequence_length, or free memory of the machine"

Pointer, Int, Threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
SUFFIXES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
HEADS = [Pointer, Int, Int, Int]
# The arguments of each function. Those in PER_NUMBER exist once for each dtype.
SORT = [Pointer, Int, Int, *[Pointer] * 3]
PER_NUMBER = {
    "combine": [*[Pointer] * 4, Int, Int, Pointer, Threads],
    "combine_backward": [*[Pointer] * 4, Int, Int, Pointer, Pointer, Threads],
    "swiglu": [Pointer, Int, Int, Pointer, Threads],
    "swiglu_backward": [Pointer, Pointer, Int, Int, Pointer, Threads],
    "rms_norm": [Pointer, Pointer, Int, Int, ctypes.c_double, Pointer, Pointer, Threads],
    "rms_norm_backward": [*[Pointer] * 4, Int, Int, Pointer, Pointer, Threads],
    "rotate": [*HEADS * 2, *[Int] * 4, Pointer, Pointer, ctypes.c_double, Threads],
}
SEEN = [Pointer, Int, ctypes.c_double]  # which scores there are: documents' starts, window, soft cap
HEADS_IN = [Pointer, *HEADS * 3, *[Int] * 5, *[Pointer] * 2, ctypes.c_double, *SEEN, *[Pointer] * 2]
EXPERTS = [*[Pointer] * 4, *[Int] * 3]
WITH_BLAS = {
    "experts": [Pointer, *EXPERTS, *[Pointer] * 2, Threads],
    "experts_backward": [Pointer, Pointer, *EXPERTS, *[Pointer] * 5, Threads],
    "attention": [*HEADS_IN, Pointer, Threads],
    "attention_backward": [*HEADS_IN, Pointer, *HEADS * 3, Threads],
}
WITH_TILES = {
    "experts": [*EXPERTS, *[Pointer] * 3, Threads],
    "experts_backward": [Pointer, *EXPERTS, *[Pointer] * 5, Threads],
}
ROUTER = {
    "softmax": [Pointer, Int, Int, Pointer, Threads],
    "softmax_backward": [Pointer, Pointer, Int, Int, Pointer, Threads],
    "top_k": [Pointer, Int, Int, Int, Pointer, Threads],
    "masked": [Pointer, Pointer, Int, ctypes.c_double, Pointer, Threads],
}
DRAWS = {"uniform": [Pointer, Int, Int, Int, Int, Pointer, Threads]}
PRODUCT = [*[Pointer] * 3, *[Int] * 3, Pointer, Threads]
PRODUCTS = ("forward", "to_rows", "to_weight")
# These take memory of their own. They return 0, the bytes that could not be had, or -1 where that is unknown.
TAKE_MEMORY = {*WITH_BLAS, *WITH_TILES, *PRODUCTS, "rms_norm_backward", "adamw", "sum_of_squares"}


@dataclass(frozen=True)
class Library:
    """The loaded library. functions: the ctypes functions by name. sgemm: the address of `sgemm` in PyTorch's
    BLAS, or None. has_tiles: whether the processor can run the products in bf16 (AMX)."""

    functions: ctypes.CDLL
    sgemm: int | None
    has_tiles: bool
    dtypes: ClassVar[Collection[torch.dtype]] = SUFFIXES

    def call(self, name: str, dtype: torch.dtype, *arguments: Any) -> None:
        """Call the function of that name for that dtype. The arguments are CPU tensors and numbers.

        Raises:
            MemoryError: if the function cannot allocate its own memory; its results are then undefined.
        """
        self._run(f"{name}_{SUFFIXES[dtype]}", *map(_address, arguments), torch.get_num_threads())

    def _run(self, name: str, *arguments: Any) -> None:
        missed = getattr(self.functions, name)(*arguments)
        if missed:
            size = "its" if missed < 0 else f"{missed} bytes of"
            raise MemoryError(f"the CPU pass {name} cannot allocate {size} scratch memory; {WAY_OUT}")

    def sort_by_key(self, key_N: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sort keys in 0 .. size-1 stably; return (order [N], position of each key [N], ends [size]), int64.

        Raises:
            IndexError: if a key is outside of 0 .. size-1.
        """
        key_N = key_N.to(torch.int64).contiguous()
        order_N, place_N, ends_S = torch.empty_like(key_N), torch.empty_like(key_N), key_N.new_empty(size)
        arguments = (key_N, key_N.numel(), size, order_N, place_N, ends_S)
        if not self.functions.sort_by_key(*map(_address, arguments)):
            raise IndexError(f"a key is not one of 0 .. {size - 1}")
        return order_N, place_N, ends_S

    def rows_by_token(self, token_N: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return (the rows ordered by token [N], where the rows of each token end [T]), int64.

        token_N: in 0 .. num_tokens-1.

        Raises:
            IndexError: if a token is outside of 0 .. num_tokens-1.
        """
        row_N, _, ends_T = self.sort_by_key(token_N, num_tokens)
        return row_N, ends_T

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> float:
        """Return the sum of squares of fp32 tensors; MemoryError as in `call`."""
        counts = (Int * len(tensors))(*(tensor.numel() for tensor in tensors))
        total = ctypes.c_double()
        arguments = (_addresses(tensors), counts, len(tensors), ctypes.byref(total))
        self._run("sum_of_squares", *arguments, torch.get_num_threads())
        return total.value

    def adamw(
        self,
        states: Sequence[Sequence[Tensor]],
        rounded: Sequence[Tensor] | None,
        corrections: Sequence[Sequence[float]],
        numbers: Sequence[float],
    ) -> None:
        """Update many fp32 tensors by one step of Adam.

        states: weights, gradients, first and second moments. rounded: see `adamw.cpp`. corrections: each
        tensor's bias corrections of the first and the second moment. numbers: factor, lr, beta1, beta2, eps,
        decay, l2. MemoryError as in `call`, before any tensor is changed.
        """
        size = len(states[0])
        counts = (Int * size)(*(weight.numel() for weight in states[0]))
        targets = None if rounded is None else _addresses(rounded)
        corrected = [(ctypes.c_double * size)(*values) for values in corrections]
        pointers = map(_addresses, states)
        threads = torch.get_num_threads()
        self._run("adamw", *pointers, targets, counts, *corrected, size, *numbers, threads)


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (Pointer * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _address(argument: object) -> int | None:
    return argument.data_ptr() if isinstance(argument, Tensor) else argument  # type: ignore[return-value]


@cache
def find_library() -> tuple[Library | None, str]:
    """Return (library, ""), built at the first call on a machine, or (None, the reason why there is none)."""
    try:
        functions = _loaded()
    except (BuildError, OSError) as error:
        return None, str(error)
    _declare(functions)
    has_tiles = bool(functions.has_tiles())
    return Library(functions, sgemm_address(), has_tiles), ""


def _loaded() -> ctypes.CDLL:
    path = _built()
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # a file that was damaged after it was built
        path.unlink(missing_ok=True)
        return ctypes.CDLL(str(_built()))


def _declare(functions: ctypes.CDLL) -> None:
    declared: dict[str, list[Any]] = {"sort_by_key": SORT, "has_tiles": []}
    declared["sum_of_squares"] = [Pointer, Pointer, Int, Pointer, Threads]
    declared["adamw"] = [*[Pointer] * 8, Int, *[ctypes.c_double] * 7, Threads]
    declared |= {
        f"{name}_{suffix}": kinds for name, kinds in PER_NUMBER.items() for suffix in SUFFIXES.values()
    }
    declared |= {f"{name}_fp32": [Pointer, *PRODUCT] for name in PRODUCTS}
    declared |= {f"{name}_fp32": kinds for name, kinds in (WITH_BLAS | ROUTER | DRAWS).items()}
    if functions.has_tiles():
        declared |= {f"{name}_bf16": PRODUCT for name in PRODUCTS}
        declared |= {f"{name}_bf16": kinds for name, kinds in WITH_TILES.items()}
    for name, kinds in declared.items():
        function = getattr(functions, name)
        takes_memory = name.removesuffix("_fp32").removesuffix("_bf16") in TAKE_MEMORY
        function.argtypes, function.restype = kinds, Int if takes_memory else None
    functions.has_tiles.restype = functions.sort_by_key.restype = ctypes.c_int


def _built() -> Path:
    compiler, version = _compiler()
    sources = sorted(SOURCES.iterdir())
    parts = [version, " ".join(_flags()), _processor(), *(path.read_text() for path in sources)]
    files = [str(path) for path in sources if path.suffix == ".cpp"]
    return cached("kernels", parts, [compiler, *_flags(), "-shared", "-fPIC", *files], BUILD_TIMEOUT_S)


def _compiler() -> tuple[str, str]:
    """Return GCC and its version.

    PyTorch's threads are those of GCC's OpenMP; a second runtime would compete with them.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise BuildError("no C++ compiler was found; install g++")
    shown = run([compiler, "--version"], BUILD_TIMEOUT_S)
    if "Free Software Foundation" not in shown:
        raise BuildError(f"{compiler} is not GCC; install g++, or name it in CXX")
    return compiler, shown


def _flags() -> list[str]:
    return FLAGS + FLAGS_OF.get(platform.machine(), [])


def _processor() -> str:
    """Return what -march=native depends on, as machines with different processors may share a home."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    shown = {line.partition(":")[0].strip(): line for line in reversed(lines)}
    return "\n".join(shown.get(key, "") for key in ("model name", "flags", "Features"))
