"""Numbers for the kernels, and how close to exact ones theirs are."""

import torch
from torch import Tensor


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return a tensor drawn from a normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close_to(found: Tensor, exact: Tensor, tolerance: float, unit: float = 0.0) -> None:
    """Relative, and absolute in units of the largest number, or of `unit` where that is larger."""
    size = max(unit, float(exact.detach().abs().max())) if exact.numel() else unit
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance * size)
