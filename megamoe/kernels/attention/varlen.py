"""Attention within documents on CUDA: PyTorch's `varlen_attn`, FlashAttention on packed sequences."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from megamoe.kernels.attention.documents import Documents

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
    length, batch, heads, _ = query_SBND.shape
    query_TND, key_TGD, value_TGD = (
        side.transpose(0, 1).flatten(0, 1) for side in (query_SBND, key_SBGD, value_SBGD)
    )
    if documents is None:
        bounds_D = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query_SBND.device)
        longest = length
    else:
        bounds_D, longest = documents.bounds_D, documents.longest
    sides = BIDIRECTIONAL if not causal else CAUSAL if window is None else (window - 1, 0)
    context_TND = varlen_attn(
        query_TND,
        key_TGD,
        value_TGD,
        bounds_D,
        bounds_D,
        longest,
        longest,
        scale=scale,
        window_size=sides,
        enable_gqa=heads != key_SBGD.shape[2],
    )
    assert isinstance(context_TND, Tensor)
    return context_TND.view(batch, length, -1).transpose(0, 1)
