"""The activation of gpt-oss: SwiGLU with clamped halves, a steeper gate and an offset of the value.

    a(g, v) = g' sigmoid(1.702 g') (v' + 1),  g' = min(g, 7),  v' = min(max(v, -7), 7)

Plain PyTorch on every device. It saves its input alone for the backward pass.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LIMIT = 7.0
STEEPNESS = 1.702
OFFSET = 1.0


def clamped_swiglu(rows_N2F: Tensor) -> Tensor:
    """[..., 2F] of [gate | value] halves -> [..., F] in the same dtype; computed in fp32."""
    rows_NF: Tensor = _ClampedSwiGLU.apply(rows_N2F)
    return rows_NF


def plain_clamped_swiglu(rows_N2F: Tensor) -> Tensor:
    """Compute `clamped_swiglu` by PyTorch's operators, in the dtype of the rows."""
    gate, value = rows_N2F.chunk(2, dim=-1)
    return steep_silu(gate.clamp(max=LIMIT)) * (value.clamp(-LIMIT, LIMIT) + OFFSET)


def steep_silu(gate: Tensor) -> Tensor:
    """Return g sigmoid(1.702 g), which approximates GELU (Hendrycks and Gimpel 2016)."""
    return gate * torch.sigmoid(STEEPNESS * gate)


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_N2F: Tensor) -> Tensor:
        ctx.save_for_backward(rows_N2F)
        return plain_clamped_swiglu(rows_N2F.float()).to(rows_N2F.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NF: Tensor) -> Tensor:
        (rows_N2F,) = ctx.saved_tensors
        gate, value = rows_N2F.float().chunk(2, dim=-1)
        inside = gate <= LIMIT, value.abs() <= LIMIT
        gate, value = gate.clamp(max=LIMIT), value.clamp(-LIMIT, LIMIT) + OFFSET
        share = torch.sigmoid(STEEPNESS * gate)
        sent = gradient_NF.float()
        to_gate = sent * value * share * (1 + STEEPNESS * gate * (1 - share))
        to_value = sent * gate * share
        return torch.cat([to_gate * inside[0], to_value * inside[1]], dim=-1).to(rows_N2F.dtype)
