"""Numbers for the kernels, and how close to exact ones theirs are."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return a tensor drawn from a normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """softmax(scale Q K^T) V by the whole matrix of scores, [S, B, N * D].

    visible: bool, the keys that each query sees, broadcast to [B, N, S, L]. sinks_N: one more column of
    scores, which has a share of the softmax and no value, as in gpt-oss's own code.
    """
    heads, size = query.shape[2:]
    key, value = (side.repeat_interleave(heads // side.shape[2], dim=2) for side in (key, value))
    scores = torch.einsum("sbnd,lbnd->bnsl", query, key) * (size**-0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks_N is not None:
        scores = torch.cat((scores, sinks_N.view(-1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    shares = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("bnsl,lbnd->sbnd", shares, value).flatten(2)


def assert_close_to(found: Tensor, exact: Tensor, tolerance: float, unit: float = 0.0) -> None:
    """Relative, and absolute in units of the largest number, or of `unit` where that is larger."""
    size = max(unit, float(exact.detach().abs().max())) if exact.numel() else unit
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance * size)


def assert_all_close_to(
    found: Iterable[Tensor], exact: Iterable[Tensor], tolerance: float, unit: float = 0.0
) -> None:
    """`assert_close_to` of each, in order."""
    for one, other in zip(found, exact, strict=True):
        assert_close_to(one, other, tolerance, unit)


def assert_one_rounding(found: Tensor, exact: Tensor, fp32: float = 2e-6) -> None:
    """In 16 bits: one unit in the last place of each result, beside what sums in fp32 round.

    found: bf16 or fp16; fp32: for which that is all. exact: float64, without the rounding of the result.
    fp32: relative to each number, and to the largest.
    """
    exact = exact.detach().double()
    size = float(exact.abs().max()) if exact.numel() else 0.0
    allowed = fp32 * (exact.abs() + size)
    if found.dtype != torch.float32:
        kind = torch.finfo(found.dtype)
        binade = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 1)
        allowed += kind.eps * binade.clamp(min=kind.tiny)
    difference = (found.detach().double() - exact).abs()
    worst = (difference / allowed).nan_to_num(0.0 if not difference.any() else torch.inf)
    assert bool((difference <= allowed).all()), f"{found.dtype}: {float(worst.max()):.2f} of what is allowed"
