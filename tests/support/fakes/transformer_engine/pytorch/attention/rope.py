"""Rotary positions. `calls`: the shapes that were rotated."""

import torch

calls: list[torch.Size] = []


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
) -> torch.Tensor:
    """Heads [S, B, heads, D] rotated in halves by angles [S, 1, 1, R], in fp32 as the fused kernel does.

    The columns from R on stay as they are.
    """
    assert fused and tensor_format == "sbhd" and start_positions is None and not interleaved
    assert freqs.dtype == torch.float32
    calls.append(t.shape)
    turning, staying = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    first, second = turning.float().chunk(2, dim=-1)
    angle = freqs[: len(t)]
    turned = turning.float() * angle.cos() + torch.cat((-second, first), dim=-1) * angle.sin()
    return torch.cat((turned.to(t.dtype), staying), dim=-1)
