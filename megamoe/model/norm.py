"""RMSNorm and LayerNorm where Megatron-Core's own refuse sequence parallelism."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megamoe.kernels.block import rms_norm
from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, by Megatron-Core's configuration (`BlockConfig`).

    Under sequence parallelism each rank has a share of the positions, so that a rank's gradient of weight and
    bias is a part of it: the parameters bear Megatron-Core's mark for what is to be summed.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.kernels: Kernels = getattr(config, "kernels", DEFAULT_KERNELS)
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if config.normalization == "LayerNorm" else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] -> the same."""
        shape = self.weight.shape
        if self.bias is None:
            return rms_norm(hidden, self.weight, self.eps, self.kernels)
        return functional.layer_norm(hidden, shape, self.weight, self.bias, self.eps)
