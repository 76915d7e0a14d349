"""Norms; the original computes as PyTorch's on the CPU too."""

from typing import Any

from torch import nn


class FusedLayerNorm(nn.LayerNorm):
    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)


class FusedRMSNorm(nn.RMSNorm):
    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
