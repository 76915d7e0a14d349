"""The compiled CPU kernels behind `kernels.library.Library`, built once on a machine by its C++ compiler.

The library has a C interface for ctypes, so that it needs no PyTorch headers and builds in seconds. It is
cached in $XDG_CACHE_HOME/megamoe (default ~/.cache/megamoe) under a hash of its sources, its compiler and the
processor. A file that another user could have written is not loaded.
"""

import ctypes
import os
import platform
import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from megamoe.compat.torch_compat import sgemm_address
from megamoe.cpu_kernels.build import BuildError, cached, run
from megamoe.kernels.library import PASSES, SUFFIXES, CompiledPass, Library

SOURCES = Path(__file__).parent
FLAGS = ["-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
FLAGS_OF = {"x86_64": ["-mprefer-vector-width=512"]}  # GCC's default is half of AVX-512's width
BUILD_TIMEOUT_S = 300
REMEDY = "take a smaller train.micro_batch_size or data.sequence_length, or free memory of the machine"

Pointer, Int, Threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
C_TYPES = {Tensor: Pointer, Tensor | None: Pointer, int: Int, float: ctypes.c_double}


class CompiledLibrary(Library):
    """The loaded library. functions: the ctypes functions by name."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        self.functions, self.sgemm, self.has_tiles = functions, sgemm_address(), bool(functions.has_tiles())

    def run(self, name: str, *arguments: Any) -> None:
        """Call the function of that name. The arguments are addresses and numbers.

        Raises:
            MemoryError: if the function cannot allocate its own memory; its results are then undefined.
        """
        missed = getattr(self.functions, name)(*arguments)
        if missed:
            size = "its" if missed < 0 else f"{missed} bytes of"
            raise MemoryError(f"the CPU pass {name} cannot allocate {size} scratch memory; {REMEDY}")

    def sort_by_key(self, key_N: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        key_N = key_N.to(torch.int64).contiguous()
        order_N, place_N, ends_S = torch.empty_like(key_N), torch.empty_like(key_N), key_N.new_empty(size)
        arguments = (key_N, key_N.numel(), size, order_N, place_N, ends_S)
        if not self.functions.sort_by_key(*map(_address, arguments)):
            raise IndexError(f"a key is not one of 0 .. {size - 1}")
        return order_N, place_N, ends_S

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> float:
        counts = (Int * len(tensors))(*(tensor.numel() for tensor in tensors))
        total = ctypes.c_double()
        arguments = (_addresses(tensors), counts, len(tensors), ctypes.byref(total))
        self.run("sum_of_squares", *arguments, torch.get_num_threads())
        return total.value

    def adamw(
        self,
        states: Sequence[Sequence[Tensor]],
        rounded: Sequence[Tensor] | None,
        corrections: Sequence[Sequence[float]],
        numbers: Sequence[float],
    ) -> None:
        size = len(states[0])
        counts = (Int * size)(*(weight.numel() for weight in states[0]))
        targets = None if rounded is None else _addresses(rounded)
        corrected = [(ctypes.c_double * size)(*values) for values in corrections]
        pointers = map(_addresses, states)
        threads = torch.get_num_threads()
        self.run("adamw", *pointers, targets, counts, *corrected, size, *numbers, threads)


def _flattened(arguments: Iterable[Any]) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from argument
        else:
            yield argument


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (Pointer * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _address(argument: object) -> int | None:
    return argument.data_ptr() if isinstance(argument, Tensor) else argument  # type: ignore[return-value]


def load() -> tuple[CompiledLibrary | None, str]:
    """Return (library, ""), built at the first call on a machine, or (None, the reason why there is none)."""
    try:
        functions = _loaded()
    except (BuildError, OSError) as error:
        return None, str(error)
    _declare(functions)
    return CompiledLibrary(functions), ""


def _loaded() -> ctypes.CDLL:
    path = _built()
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # a file that was damaged after it was built
        path.unlink(missing_ok=True)
        return ctypes.CDLL(str(_built()))


def _declare(functions: ctypes.CDLL) -> None:
    functions.has_tiles.argtypes, functions.has_tiles.restype = [], ctypes.c_int
    functions.sort_by_key.argtypes = [Pointer, Int, Int, *[Pointer] * 3]
    functions.sort_by_key.restype = ctypes.c_int
    functions.sum_of_squares.argtypes = [Pointer, Pointer, Int, Pointer, Threads]
    functions.adamw.argtypes = [*[Pointer] * 8, Int, *[ctypes.c_double] * 7, Threads]
    functions.sum_of_squares.restype = functions.adamw.restype = Int
    for name, declared in PASSES.items():
        _declare_pass(functions, name, declared)


def _declare_pass(functions: ctypes.CDLL, name: str, declared: CompiledPass) -> None:
    """Tell ctypes the arguments and the result of a pass, and make its method of `CompiledLibrary`."""
    kinds = [kind for argument, kind in get_type_hints(declared.signature).items() if argument != "return"]
    flat = [each for kind in kinds for each in (get_args(kind) if get_origin(kind) is tuple else (kind,))]
    for dtype in declared.dtypes:
        if dtype == torch.bfloat16 and declared.tiles and not functions.has_tiles():
            continue
        function = getattr(functions, f"{name}_{SUFFIXES[dtype]}")
        blas = [Pointer] if declared.blas and dtype == torch.float32 else []
        function.argtypes = [*blas, *map(C_TYPES.__getitem__, flat), Threads]
        function.restype = Int if declared.memory else None

    nested, of_one = len(flat) != len(kinds), SUFFIXES[declared.dtypes[0]]
    has_one = len(declared.dtypes) == 1

    @wraps(declared.signature)
    def call(self: CompiledLibrary, *arguments: Any) -> None:
        suffix = of_one if has_one else SUFFIXES[arguments[0].dtype]
        if nested:
            arguments = tuple(_flattened(arguments))
        if declared.blas and suffix == "fp32":
            arguments = (self.sgemm, *arguments)
        self.run(f"{name}_{suffix}", *map(_address, arguments), torch.get_num_threads())

    setattr(CompiledLibrary, name, call)


def _built() -> Path:
    compiler, version = _compiler()
    sources = sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
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
