"""Norms; the original computes as PyTorch's on the CPU too."""

from typing import Any

from torch import nn


class _Fused:
    """With the arguments of Apex's norms."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)  # type: ignore[call-arg]


class FusedLayerNorm(_Fused, nn.LayerNorm):
    pass


class FusedRMSNorm(_Fused, nn.RMSNorm):
    pass
