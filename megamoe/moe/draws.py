"""Random draws keyed by token, never by rank.

A draw is a hash of (seed, step, layer, purpose, token index, column): the same under every layout,
after a resume, and when a block is recomputed. The hash is SplitMix64's finaliser (Steele, Lea and
Flood 2014) on int64 tensors, whose products wrap as unsigned ones do.
"""

import hashlib

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def key(seed: int, step: int, layer: int, purpose: str) -> int:
    """A 63-bit key of what the draw is for."""
    text = f"{seed}/{step}/{layer}/{purpose}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def uniform(draw_key: int, token_index_T: Tensor, columns: int) -> Tensor:
    """fp32 [T, columns] in [0, 1): 24 random bits each."""
    column_C = torch.arange(1, columns + 1, device=token_index_T.device) * _GOLDEN
    state_T = _mix(token_index_T.to(torch.int64) * _GOLDEN + draw_key)
    bits_TC = _mix(state_T[:, None] + column_C[None, :])
    return _shift(bits_TC, 40).to(torch.float32) * 2.0**-24


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift right: int64's own drags the sign along."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
