"""The interface of the compiled CPU kernels, which `megamoe/cpu_kernels` implements. They are optional."""

import importlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, TypeVar, cast

import torch
from torch import Tensor

SUFFIXES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
BOTH = tuple(SUFFIXES)
Heads = tuple[Tensor, int, int, int]  # [S, B, N, D] with the strides of S, B and N in numbers
Sizes = tuple[int, int, int, int, int]  # positions, sequences, query heads, key heads, head size
Signature = TypeVar("Signature", bound=Callable[..., None])
IMPLEMENTATION = "megamoe.cpu_kernels.library"  # imported by name, like a plugin


@dataclass(frozen=True)
class CompiledPass:
    """A function of the library. Its signature is the method of `Library` with the same name.

    dtypes: the function exists once for each; with more than one, the first argument's dtype chooses. blas:
    in fp32 it takes the address of `sgemm` first. tiles: in bf16 it exists only on processors with AMX.
    memory: it returns 0, the bytes of scratch memory that could not be had, or -1 where that is unknown.
    """

    signature: Callable[..., None]
    dtypes: tuple[torch.dtype, ...]
    blas: bool
    tiles: bool
    memory: bool


PASSES: dict[str, CompiledPass] = {}


def _compiled(
    *dtypes: torch.dtype, blas: bool = False, tiles: bool = False, memory: bool = False
) -> Callable[[Signature], Signature]:
    """Declare a method, of which only the signature counts, as a pass: see `CompiledPass`."""

    def declare(method: Signature) -> Signature:
        PASSES[method.__name__] = CompiledPass(method, dtypes, blas, tiles, memory or blas)
        return method

    return declare


class Library:
    """Compiled passes for tensors on the CPU.

    sgemm: the address of `sgemm` in PyTorch's BLAS, or None. has_tiles: whether the processor can run the
    products in bf16 (AMX). A pass raises MemoryError if it cannot allocate its own memory.
    """

    sgemm: int | None
    has_tiles: bool
    dtypes: ClassVar[Collection[torch.dtype]] = SUFFIXES

    def keeps_activated(self, dtype: torch.dtype) -> bool:
        """Return whether `experts` writes the activated rows, which are then an argument."""
        return dtype != torch.float32

    def sort_by_key(self, key_N: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sort keys in 0 .. size-1 stably; return (order [N], position of each key [N], ends [size]), int64.

        Raises:
            IndexError: if a key is outside of 0 .. size-1.
        """
        raise NotImplementedError

    def rows_by_token(self, token_N: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return (the rows ordered by token [N], where the rows of each token end [T]), int64.

        token_N: in 0 .. num_tokens-1; IndexError otherwise.
        """
        row_N, _, ends_T = self.sort_by_key(token_N, num_tokens)
        return row_N, ends_T

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> float:
        """Return the sum of squares of fp32 tensors."""
        raise NotImplementedError

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
        decay, l2. MemoryError is raised before any tensor is changed.
        """

    # The passes. Their source says what they compute; the modules that call them have a plain form.

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


@cache
def find_library() -> tuple[Library | None, str]:
    """Return (library, ""), built at the first call on a machine, or (None, the reason why there is none)."""
    return cast("tuple[Library | None, str]", importlib.import_module(IMPLEMENTATION).load())
