"""Attention with rotary positions: PyTorch's, its varlen form on CUDA, or for causal attention on the CPU
in fp32 the library's.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megamoe.kernels.attention.documents import Documents, Run, SourceLengths
from megamoe.kernels.attention.rotary import (
    Rotary,
    angles_of,
    apply_rotary,
    apply_rotary_at,
    apply_rotary_qk,
    gradients_of,
)
from megamoe.kernels.attention.variants import PLAIN, Variant, varied_attention
from megamoe.kernels.autograd import Function, once_differentiable
from megamoe.kernels.choice import Kernels
from megamoe.kernels.library import Library

DTYPES = (torch.float16, torch.bfloat16)
MOST_COLUMNS, COLUMNS_MULTIPLE = 256, 8
CAUSAL = (-1, 0)  # all keys before the query, none behind it
BIDIRECTIONAL = (-1, -1)
OLDEST = (8, 0)  # compute capability: Ampere


def fits_varlen(query_SBND: Tensor) -> bool:
    """Return whether `varlen_attention` takes these heads: on CUDA from Ampere on, fp16 or bf16.

    Heads have a multiple of 8 columns, at most 256.
    """
    columns = query_SBND.shape[-1]
    fits = query_SBND.dtype in DTYPES and columns <= MOST_COLUMNS and columns % COLUMNS_MULTIPLE == 0
    return fits and query_SBND.device.type == "cuda" and _capability(query_SBND.device) >= OLDEST


@lru_cache(maxsize=8)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def varlen_attention(
    query_SBND: Tensor,
    key_SBGD: Tensor,
    value_SBGD: Tensor,
    documents: Documents | None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """Attention within documents, causal or not; shapes as `causal_attention`, [S, B, N * D].

    documents: None: each sequence is one. window: causal attention sees so many keys, a query's own included.
    The host has the lengths already, so that nothing waits for the device.
    """
    from torch.nn.attention.varlen import varlen_attn  # imports torch._dynamo, which takes a second

    length, batch, heads, _ = query_SBND.shape
    query_TND, key_TGD, value_TGD = (
        heads.transpose(0, 1).flatten(0, 1) for heads in (query_SBND, key_SBGD, value_SBGD)
    )
    if documents is None:
        bounds_D = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query_SBND.device)
        longest = length
    else:
        bounds_D, longest = documents.bounds_D, documents.longest
    window_size = BIDIRECTIONAL if not causal else CAUSAL if window is None else (window - 1, 0)
    context_TND = varlen_attn(
        query_TND,
        key_TGD,
        value_TGD,
        bounds_D,
        bounds_D,
        longest,
        longest,
        scale=scale,
        window_size=window_size,
        enable_gqa=heads != key_SBGD.shape[2],
    )
    assert isinstance(context_TND, Tensor)
    return context_TND.view(batch, length, -1).transpose(0, 1)


def causal_attention(
    query_SBND: Tensor,
    key_SBGD: Tensor,
    value_SBGD: Tensor,
    rotary: Rotary | None = None,
    scale: float | None = None,
    documents: Documents | None = None,
    variant: Variant = PLAIN,
    *,
    kernels: Kernels,
) -> Tensor:
    """Causal attention: return each position's weighted mean of the values up to it, [S, B, N * D].

    N / G query heads share a key head. rotary: rotates queries and keys by their positions; None: nothing
    does. scale: the factor of the scores, by default 1 / sqrt(D). documents: a position sees those of its own
    document only, and rotary positions begin at 0 in each; None: each sequence is one document. variant: a
    window, sinks or soft-capped scores.

    Raises:
        ValueError: if heads of odd size are to be rotated, or the documents are of other sequences.
    """
    if documents is not None and documents.start_BS.shape != query_SBND.shape[1::-1]:
        found, expected = tuple(documents.start_BS.shape), tuple(query_SBND.shape[1::-1])
        raise ValueError(f"documents: found those of [B, S] = {found}, the queries have {expected}")
    qkv = (query_SBND, key_SBGD, value_SBGD)
    library = _library_for(*qkv, kernels)
    if library is None:
        return plain_causal_attention(*qkv, rotary, scale, documents, variant, kernels=kernels)
    scale = query_SBND.shape[-1] ** -0.5 if scale is None else scale
    tables: tuple[Tensor | None, Tensor | None] = (None, None)
    if rotary is not None and rotary.rotates_halves(query_SBND.shape[-1]):
        tables = angles_of(query_SBND, len(query_SBND), rotary)
    else:
        qkv = (*turned(query_SBND, key_SBGD, rotary, documents, kernels), value_SBGD)
    start_BS = None if documents is None else documents.start_BS
    window = len(query_SBND) if variant.window is None else variant.window
    sinks_N = None if variant.sinks_N is None else variant.sinks_N.float().contiguous()
    options = (scale, start_BS, window, variant.soft_cap or 0.0)
    return _Attention.apply(*qkv, sinks_N, *tables, *options, library)


def plain_causal_attention(
    query_SBND: Tensor,
    key_SBGD: Tensor,
    value_SBGD: Tensor,
    rotary: Rotary | None = None,
    scale: float | None = None,
    documents: Documents | None = None,
    variant: Variant = PLAIN,
    *,
    kernels: Kernels,
) -> Tensor:
    """Compute `causal_attention` by PyTorch's operators."""
    if rotary is not None and documents is None:
        query_SBND, key_SBGD, value_SBGD = apply_rotary_qk(query_SBND, key_SBGD, value_SBGD, rotary, kernels)
    else:
        query_SBND, key_SBGD = turned(query_SBND, key_SBGD, rotary, documents, kernels)
    qkv = (query_SBND, key_SBGD, value_SBGD)
    takes_lengths = documents is not None or variant.window is not None
    if takes_lengths and variant.only_window and fits_varlen(query_SBND):
        return varlen_attention(*qkv, documents, scale, window=variant.window)
    if not variant.is_plain:
        return varied_attention(*qkv, scale, documents, variant)
    return attend(*qkv, documents, scale=scale)


def bidirectional_attention(
    query_SBND: Tensor,
    key_SBGD: Tensor,
    value_SBGD: Tensor,
    rotary: Rotary | None = None,
    scale: float | None = None,
    documents: Documents | None = None,
    dropout_p: float = 0.0,
    *,
    kernels: Kernels,
) -> Tensor:
    """Attention in which each position sees its whole sequence or document; else as `causal_attention`.

    It uses PyTorch's operators: the compiled library's pass is causal. dropout_p: of attention weights.
    """
    qkv = (*turned(query_SBND, key_SBGD, rotary, documents, kernels), value_SBGD)
    if documents is not None and not dropout_p and fits_varlen(query_SBND):
        return varlen_attention(*qkv, documents, scale, causal=False)
    return attend(*qkv, documents, causal=False, dropout_p=dropout_p, scale=scale)


def cross_attention(
    query_SBND: Tensor,
    key_LBND: Tensor,
    value_LBND: Tensor,
    lengths: SourceLengths | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention of S positions to the L positions of other sequences; return [S, B, N * D].

    lengths: where those sequences end; None: they have no padding. There are no rotary positions, because
    the distance of positions in two sequences has no meaning.
    """
    visible = None if lengths is None else lengths.visible_B11L
    return _attend(query_SBND, key_LBND, value_LBND, attn_mask=visible, dropout_p=dropout_p, scale=scale)


def apply_rotary_with_documents(
    heads_SBND: Tensor, rotary: Rotary, documents: Documents | None, kernels: Kernels
) -> Tensor:
    """Turn queries or keys by their positions in the sequence or, where given, in the documents."""
    if documents is None:
        return apply_rotary(heads_SBND, rotary, kernels)
    length = len(heads_SBND)
    place_SB = torch.arange(length, device=heads_SBND.device)[:, None] - documents.start_BS.T
    return apply_rotary_at(heads_SBND, place_SB, length, rotary, kernels)


def turned(
    query: Tensor, key: Tensor, rotary: Rotary | None, documents: Documents | None, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """Return queries and keys after `apply_rotary_with_documents`; without rotary positions as they are."""
    if rotary is None:
        return query, key
    return (
        apply_rotary_with_documents(query, rotary, documents, kernels),
        apply_rotary_with_documents(key, rotary, documents, kernels),
    )


def attend(
    query_SBND: Tensor,
    key_SBGD: Tensor,
    value_SBGD: Tensor,
    documents: Documents | None = None,
    causal: bool = True,
    **options: Any,
) -> Tensor:
    """Apply scaled_dot_product_attention to heads in Megatron's order; return [S, B, N * D].

    documents: it is applied to each long one by itself and to short neighbours together, under a small mask.
    causal: a position sees those up to it. options: `dropout_p` and `scale`.
    """
    qkv = (query_SBND, key_SBGD, value_SBGD)
    if documents is None:
        return _attend(*qkv, is_causal=causal, **options)
    runs_B = documents.runs()
    if all(len(runs) == 1 for runs in runs_B):  # short sequences, or one document in each
        return _attend_run(*qkv, documents, slice(None), 0, [run for (run,) in runs_B], causal, options)
    # Slices would each have a gradient as large as the whole; what `split` cuts is put together once.
    sequences = zip(runs_B, *(_split(heads, [1] * len(runs_B), 1) for heads in qkv), strict=True)
    columns = []
    for number, (runs, *sequence) in enumerate(sequences):
        lengths = [run.length for run in runs]
        pieces = zip(*(_split(side_S1ND, lengths, 0) for side_S1ND in sequence), strict=True)
        outputs, first, place = [], 0, slice(number, number + 1)
        for run, (query, key, value) in zip(runs, pieces, strict=True):
            outputs.append(_attend_run(query, key, value, documents, place, first, [run], causal, options))
            first += run.length
        columns.append(_joined_along(outputs, 0))
    return _joined_along(columns, 1)


def _split(heads: Tensor, lengths: list[int], dim: int) -> tuple[Tensor, ...]:
    return heads.split(lengths, dim) if len(lengths) > 1 else (heads,)


def _joined_along(parts: list[Tensor], dim: int) -> Tensor:
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _attend_run(
    query_SBND: Tensor,
    key_SBGD: Tensor,
    value_SBGD: Tensor,
    documents: Documents,
    sequences: slice,
    first: int,
    runs: list[Run],
    causal: bool,
    options: dict[str, Any],
) -> Tensor:
    """Apply attention to one run of each of the sequences; all begin at position `first`, with one length."""
    qkv, is_one = (query_SBND, key_SBGD, value_SBGD), all(run.is_one for run in runs)
    visible = None if is_one else documents.visible(sequences, first, runs[0].length, causal)
    return _attend(*qkv, is_causal=causal and is_one, attn_mask=visible, **options)


def _attend(query_SBND: Tensor, key_SBGD: Tensor, value_SBGD: Tensor, **options: Any) -> Tensor:
    query, key, value = (heads.permute(1, 2, 0, 3) for heads in (query_SBND, key_SBGD, value_SBGD))
    options["enable_gqa"] = query.shape[1] != key.shape[1]
    context_BNSD = functional.scaled_dot_product_attention(query, key, value, **options)
    return context_BNSD.permute(2, 0, 1, 3).flatten(2)


def split_heads(mixed: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Split the last dimension as torch.split does, but do not copy gradients that are adjacent in memory."""
    return _Split.apply(mixed, sizes)


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        ctx.sizes = sizes
        return torch.split(mixed, sizes, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _joined(gradients, ctx.sizes), None


def _joined(slices: tuple[Tensor, ...], sizes: list[int]) -> Tensor:
    first, place = slices[0], slices[0].storage_offset()
    stride = first.stride()
    for each, size in zip(slices, sizes, strict=True):
        same = each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        beside = each.stride() == stride and stride[-1] == 1 and each.storage_offset() == place
        if not (same and beside):
            return torch.cat(slices, dim=-1)
        place += size
    return first.as_strided((*first.shape[:-1], sum(sizes)), stride)


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks_N: Tensor | None,
        cosine: Tensor | None,
        sine: Tensor | None,
        scale: float,
        start_BS: Tensor | None,
        window: int,
        soft_cap: float,
        library: Library,
    ) -> Tensor:
        length, batch, heads, size = query.shape
        output = query.new_empty(length, batch, heads * size)
        log_sum_BNS = query.new_empty(batch, heads, length)
        sizes = (length, batch, heads, key.shape[2], size)
        settings = (sizes, cosine, sine, scale, start_BS, window, soft_cap)
        sums = (output, log_sum_BNS, sinks_N)
        library.attention(_heads(query), _heads(key), _heads(value), *settings, *sums)
        ctx.settings = settings
        ctx.save_for_backward(query, key, value, *sums)
        ctx.library = library
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sum_BNS, sinks_N = ctx.saved_tensors
        to_query, to_key, to_value = gradients_of(query, key, value)
        qkv = (_heads(query), _heads(key), _heads(value))
        gradients = (_heads(to_query), _heads(to_key), _heads(to_value))
        passed = (*qkv, *ctx.settings, output, log_sum_BNS, gradient.contiguous(), *gradients)
        ctx.library.attention_backward(*passed)
        to_sinks_N = None
        if sinks_N is not None:  # its share of the softmax times the slope of a score whose value is 0
            share_BNS = (sinks_N[:, None] - log_sum_BNS).exp()
            mean_SBN = (output * gradient).unflatten(2, (len(sinks_N), -1)).sum(-1)
            to_sinks_N = -torch.einsum("bns,sbn->n", share_BNS, mean_SBN)
        return to_query, to_key, to_value, to_sinks_N, *[None] * 7


def _heads(heads: Tensor) -> tuple[Tensor, int, int, int]:
    """Return the heads' address, and their strides over positions, sequences and heads."""
    position, sequence, head, _ = heads.stride()
    return heads, position, sequence, head


def _library_for(query: Tensor, key: Tensor, value: Tensor, kernels: Kernels) -> Library | None:
    """Return the library if it supports these tensors and there is a key head for each thread, else None."""
    library = kernels.library_on(query.device)
    qkv = (query, key, value)
    fits = all(heads.dtype == torch.float32 and heads.dim() == 4 and heads.stride(-1) == 1 for heads in qkv)
    if library is None or library.sgemm is None or not fits:
        return None
    alike = query.shape[:2] == key.shape[:2] and key.shape == value.shape and query.shape[3] == key.shape[3]
    shares = alike and query.shape[2] % key.shape[2] == 0
    return library if shares and key.shape[1] * key.shape[2] >= torch.get_num_threads() else None
