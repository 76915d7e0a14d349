"""The compiled CPU kernels: built once on a machine by its C++ compiler. They are optional.

The library has a C interface for ctypes, so that it needs no PyTorch headers and builds in seconds. It is
cached in $XDG_CACHE_HOME/megamoe (default ~/.cache/megamoe) under a hash of its sources, its compiler and the
processor. A file that another user could have written is not loaded.
"""

import ctypes
import os
import platform
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from megamoe.compat.torch_compat import sgemm_address
from megamoe.kernels.build import BuildError, cached, run

SOURCES = Path(__file__).parent / "cpu"
FLAGS = ["-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
FLAGS_OF = {"x86_64": ["-mprefer-vector-width=512"]}  # GCC's default is half of AVX-512's width
BUILD_TIMEOUT_S = 300
REMEDY = "take a smaller train.micro_batch_size or data.sequence_length, or free memory of the machine"

Pointer, Int, Threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
SUFFIXES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
BOTH = tuple(SUFFIXES)
C_TYPES = {Tensor: Pointer, Tensor | None: Pointer, int: Int, float: ctypes.c_double}
Heads = tuple[Tensor, int, int, int]  # [S, B, N, D] with the strides of S, B and N in numbers
Sizes = tuple[int, int, int, int, int]  # positions, sequences, query heads, key heads, head size
Pass = TypeVar("Pass", bound=Callable[..., None])


@dataclass(frozen=True)
class CompiledPass:
    """A function of the library, which exists once for each dtype.

    types: of its arguments. needs_blas: in fp32 it takes the address of `sgemm` first. needs_tiles: in bf16
    it exists only on processors with AMX. takes_memory: it returns 0, the bytes of scratch memory that could
    not be had, or -1 where that is unknown.
    """

    name: str
    types: list[Any]
    suffixes: list[str]
    needs_blas: bool
    needs_tiles: bool
    takes_memory: bool

    def declare(self, functions: ctypes.CDLL, has_tiles: bool) -> None:
        """Tell ctypes the arguments and the result."""
        for suffix in self.suffixes:
            if suffix == "bf16" and self.needs_tiles and not has_tiles:
                continue
            function = getattr(functions, f"{self.name}_{suffix}")
            blas = [Pointer] if self.needs_blas and suffix == "fp32" else []
            function.argtypes = [*blas, *self.types, Threads]
            function.restype = Int if self.takes_memory else None


PASSES: list[CompiledPass] = []


def _compiled(
    *dtypes: torch.dtype, blas: bool = False, tiles: bool = False, memory: bool = False
) -> Callable[[Pass], Pass]:
    """Make a method, of which only the signature counts, a call of the C function of its name and dtype.

    dtypes: with more than one, the first argument's dtype chooses. The rest: see `CompiledPass`.
    """

    def declare(method: Pass) -> Pass:
        name, hints = method.__name__, get_type_hints(method)
        kinds = [kind for name, kind in hints.items() if name != "return"]
        flat = [each for kind in kinds for each in (get_args(kind) if get_origin(kind) is tuple else (kind,))]
        nested = len(flat) != len(kinds)
        suffixes = [SUFFIXES[dtype] for dtype in dtypes]
        types = [C_TYPES[each] for each in flat]
        PASSES.append(CompiledPass(name, types, suffixes, blas, tiles, memory or blas))

        @wraps(method)
        def call(self: "Library", *arguments: Any) -> None:
            suffix = suffixes[0] if len(suffixes) == 1 else SUFFIXES[arguments[0].dtype]
            if nested:
                arguments = tuple(_flattened(arguments))
            if blas and suffix == "fp32":
                arguments = (self.sgemm, *arguments)
            self.run(f"{name}_{suffix}", *map(_address, arguments), torch.get_num_threads())

        return cast(Pass, call)

    return declare


@dataclass(frozen=True)
class Library:
    """The loaded library. functions: the ctypes functions by name. sgemm: the address of `sgemm` in PyTorch's
    BLAS, or None. has_tiles: whether the processor can run the products in bf16 (AMX)."""

    functions: ctypes.CDLL
    sgemm: int | None
    has_tiles: bool
    dtypes: ClassVar[Collection[torch.dtype]] = SUFFIXES

    def run(self, name: str, *arguments: Any) -> None:
        """Call the function of that name. The arguments are addresses and numbers.

        Raises:
            MemoryError: if the function cannot allocate its own memory; its results are then undefined.
        """
        missed = getattr(self.functions, name)(*arguments)
        if missed:
            size = "its" if missed < 0 else f"{missed} bytes of"
            raise MemoryError(f"the CPU pass {name} cannot allocate {size} scratch memory; {REMEDY}")

    def keeps_activated(self, dtype: torch.dtype) -> bool:
        """Return whether `experts` writes the activated rows, which are then an argument."""
        return dtype != torch.float32

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
        """Return the sum of squares of fp32 tensors; MemoryError as in `run`."""
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
        """Update many fp32 tensors by one step of Adam.

        states: weights, gradients, first and second moments. rounded: see `adamw.cpp`. corrections: each
        tensor's bias corrections of the first and the second moment. numbers: factor, lr, beta1, beta2, eps,
        decay, l2. MemoryError as in `run`, before any tensor is changed.
        """
        size = len(states[0])
        counts = (Int * size)(*(weight.numel() for weight in states[0]))
        targets = None if rounded is None else _addresses(rounded)
        corrected = [(ctypes.c_double * size)(*values) for values in corrections]
        pointers = map(_addresses, states)
        threads = torch.get_num_threads()
        self.run("adamw", *pointers, targets, counts, *corrected, size, *numbers, threads)

    # The passes. Their source in cpu/ says what they compute; the modules that call them have a plain form.

    # fmt: off

    @_compiled(*BOTH)
    def combine(
        self, rows_NH: Tensor, row_N: Tensor, ends_T: Tensor, weight_N: Tensor | None, tokens: int,
        width: int, out_TH: Tensor
    ) -> None: ...

    @_compiled(*BOTH)
    def combine_backward(
        self, gradient_TH: Tensor, rows_NH: Tensor, token_N: Tensor, weight_N: Tensor, count: int,
        width: int, to_rows_NH: Tensor, to_weight_N: Tensor
    ) -> None: ...

    @_compiled(*BOTH)
    def swiglu(self, rows_N2F: Tensor, count: int, width: int, out_NF: Tensor) -> None: ...

    @_compiled(*BOTH)
    def swiglu_backward(
        self, gradient_NF: Tensor, rows_N2F: Tensor, count: int, width: int, to_rows_N2F: Tensor
    ) -> None: ...

    @_compiled(*BOTH)
    def rms_norm(
        self, rows: Tensor, weight_H: Tensor, count: int, width: int, eps: float, out: Tensor,
        scale_N: Tensor
    ) -> None: ...

    @_compiled(*BOTH, memory=True)
    def rms_norm_backward(
        self, sent: Tensor, rows: Tensor, weight_H: Tensor, scale_N: Tensor, count: int, width: int,
        to_rows: Tensor, to_weight_H: Tensor
    ) -> None: ...

    @_compiled(*BOTH)
    def rotate(
        self, heads: Tensor, from_s: int, from_b: int, from_n: int, out: Tensor, to_s: int, to_b: int,
        to_n: int, length: int, batch: int, count: int, half: int, cosine_SD: Tensor, sine_SD: Tensor,
        sign: float
    ) -> None: ...

    @_compiled(*BOTH, blas=True, tiles=True)
    def forward(
        self, rows_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor, experts: int, inner: int, outer: int,
        out_NO: Tensor
    ) -> None: ...

    @_compiled(*BOTH, blas=True, tiles=True)
    def to_rows(
        self, sent_NO: Tensor, weight_EOI: Tensor, ends_E: Tensor, experts: int, inner: int, outer: int,
        out_NI: Tensor
    ) -> None: ...

    @_compiled(*BOTH, blas=True, tiles=True)
    def to_weight(
        self, sent_NO: Tensor, rows_NI: Tensor, ends_E: Tensor, experts: int, inner: int, outer: int,
        out_EOI: Tensor
    ) -> None: ...

    @_compiled(*BOTH, blas=True, tiles=True)
    def experts(
        self, rows_NH: Tensor, up_EGH: Tensor, down_EHF: Tensor, ends_E: Tensor, count: int,
        hidden_size: int, ffn_size: int, hidden_NG: Tensor, active_NF: Tensor, out_NH: Tensor
    ) -> None: ...

    @_compiled(*BOTH, blas=True, tiles=True)
    def experts_backward(
        self, sent_NH: Tensor, rows_NH: Tensor, up_EGH: Tensor, down_EHF: Tensor, ends_E: Tensor, count: int,
        hidden_size: int, ffn_size: int, hidden_NG: Tensor, active_NF: Tensor, to_rows_NH: Tensor | None,
        to_up_EGH: Tensor | None, to_down_EHF: Tensor | None
    ) -> None: ...

    @_compiled(torch.float32, blas=True)
    def attention(
        self, query: Heads, key: Heads, value: Heads, sizes: Sizes, cosine_SD: Tensor | None,
        sine_SD: Tensor | None, scale: float, start_BS: Tensor | None, window: int, soft_cap: float,
        out: Tensor, log_sum_BNS: Tensor, sinks_N: Tensor | None
    ) -> None: ...

    @_compiled(torch.float32, blas=True)
    def attention_backward(
        self, query: Heads, key: Heads, value: Heads, sizes: Sizes, cosine_SD: Tensor | None,
        sine_SD: Tensor | None, scale: float, start_BS: Tensor | None, window: int, soft_cap: float,
        out: Tensor, log_sum_BNS: Tensor, sent: Tensor, to_query: Heads, to_key: Heads, to_value: Heads
    ) -> None: ...

    @_compiled(torch.float32)
    def softmax(self, scores_TE: Tensor, tokens: int, experts: int, out_TE: Tensor) -> None: ...

    @_compiled(torch.float32)
    def softmax_backward(
        self, gradient_TE: Tensor, probs_TE: Tensor, tokens: int, experts: int, to_scores_TE: Tensor
    ) -> None: ...

    @_compiled(torch.float32)
    def top_k(self, scores_TE: Tensor, tokens: int, experts: int, count: int, chosen_TK: Tensor) -> None: ...

    @_compiled(torch.float32)
    def masked(
        self, values_TE: Tensor, kept_TE: Tensor, count: int, otherwise: float, out_TE: Tensor
    ) -> None: ...

    @_compiled(torch.float32)
    def uniform(
        self, token_index_T: Tensor, tokens: int, first: int, columns: int, key: int, out_TC: Tensor
    ) -> None: ...

    # fmt: on


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
    functions.has_tiles.argtypes, functions.has_tiles.restype = [], ctypes.c_int
    functions.sort_by_key.argtypes = [Pointer, Int, Int, *[Pointer] * 3]
    functions.sort_by_key.restype = ctypes.c_int
    functions.sum_of_squares.argtypes = [Pointer, Pointer, Int, Pointer, Threads]
    functions.adamw.argtypes = [*[Pointer] * 8, Int, *[ctypes.c_double] * 7, Threads]
    functions.sum_of_squares.restype = functions.adamw.restype = Int
    for each in PASSES:
        each.declare(functions, bool(functions.has_tiles()))


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
