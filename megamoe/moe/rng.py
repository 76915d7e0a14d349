"""Random draws that depend on the token and never on the rank.

A draw is a hash of (seed, step, layer, purpose, token index, column). It is the same under every layout,
after a resume, and when a block is recomputed. The hash is SplitMix64's finaliser (Steele, Lea and Flood
2014) on int64 tensors, whose products wrap as unsigned ones do. On the CPU the compiled library computes it,
with the same bits.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def key(seed: int, step: int, layer: int, purpose: str) -> int:
    """Return a 63-bit key for one purpose."""
    text = f"{seed}/{step}/{layer}/{purpose}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def uniform(
    draw_key: int,
    token_index_T: Tensor,
    columns: int,
    first_column: int = 0,
    *,
    kernels: Kernels = DEFAULT_KERNELS,
) -> Tensor:
    """fp32 [T, columns] in [0, 1), the columns counted from `first_column`: 24 random bits each."""
    library = kernels.library_on(token_index_T.device)
    if library is None:
        return plain_uniform(draw_key, token_index_T, columns, first_column)
    token_index_T = token_index_T.to(torch.int64).contiguous()
    unit_TC = torch.empty(len(token_index_T), columns, dtype=torch.float32, device=token_index_T.device)
    sizes = (len(token_index_T), first_column, columns)
    library.uniform(token_index_T, *sizes, draw_key, unit_TC)
    return unit_TC


def plain_uniform(draw_key: int, token_index_T: Tensor, columns: int, first_column: int = 0) -> Tensor:
    """`uniform` in PyTorch's operators: its oracle, and its form on GPUs."""
    column_C = torch.arange(first_column + 1, first_column + columns + 1, device=token_index_T.device)
    column_C = column_C * _GOLDEN
    state_T = _mix_(token_index_T.to(torch.int64) * _GOLDEN + draw_key)
    bits_TC = _mix_(state_T[:, None] + column_C[None, :])
    return _shift(bits_TC, 40, bits_TC).to(torch.float32).mul_(2.0**-24)


def normal(
    draw_key: int, token_index_T: Tensor, columns: int, *, kernels: Kernels = DEFAULT_KERNELS
) -> Tensor:
    """fp32 [T, columns] of N(0, 1), by the inverse of its distribution; no draw is beyond 5.5."""
    # The middle of each of uniform's 2^24 steps: never 0 nor 1, and exact in fp32 on both sides of 1/2.
    centred_TC = uniform(draw_key, token_index_T, columns, kernels=kernels).sub_(0.5).add_(2.0**-25)
    return centred_TC.mul_(2.0).erfinv_().mul_(math.sqrt(2.0))


def gumbel(
    draw_key: int, token_index_T: Tensor, columns: int, *, kernels: Kernels = DEFAULT_KERNELS
) -> Tensor:
    """fp32 [T, columns] of Gumbel(0, 1); the largest of scores plus such draws samples their softmax."""
    unit_TC = uniform(draw_key, token_index_T, columns, kernels=kernels)
    return unit_TC.clamp_min(2.0**-25).log().neg().log().neg()  # 0 is drawn once in 2^24


def _mix_(z: Tensor) -> Tensor:
    """SplitMix64's finaliser in place; new memory at every step would cost several times the arithmetic."""
    scratch = torch.empty_like(z)
    z.bitwise_xor_(_shift(z, 30, scratch)).mul_(_MIX_1)
    z.bitwise_xor_(_shift(z, 27, scratch)).mul_(_MIX_2)
    return z.bitwise_xor_(_shift(z, 31, scratch))


def _shift(z: Tensor, bits: int, out: Tensor) -> Tensor:
    """Logical shift right into `out`; int64's own shift is arithmetic."""
    return torch.bitwise_right_shift(z, bits, out=out).bitwise_and_((1 << (64 - bits)) - 1)


def init_weight(weight: Tensor, draw_key: int, std: float, scale: float | None) -> None:
    """Initialise a weight [..., out, in] in place.

    scale None: normal with standard deviation `std`. scale s: normal with standard deviation sqrt(s /
    fan_in), truncated at two of them (Switch Transformer: Fedus et al. 2021, section 2.4; s = 0.1 there, a
    tenth of the usual 1). Nothing is drawn on the meta device, for which PyTorch would import its compiler.
    """
    if weight.is_meta:
        return
    generator = torch.Generator().manual_seed(draw_key)
    if scale is None:
        nn.init.normal_(weight.data, std=std, generator=generator)
    else:
        std = math.sqrt(scale / weight.shape[-1])
        nn.init.trunc_normal_(weight.data, std=std, a=-2 * std, b=2 * std, generator=generator)
