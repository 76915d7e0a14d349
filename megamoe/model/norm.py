"""RMSNorm and LayerNorm for sequence parallelism, which Megatron-Core's own norms refuse."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.kernels.rms_norm import rms_norm, summed_rms_norm


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, by Megatron-Core's configuration (`BlockConfig`).

    Under sequence parallelism each rank has a part of the positions, so its gradients of weight and bias are
    partial. The parameters carry Megatron-Core's mark for gradients that must be summed.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.kernels: Kernels = getattr(config, "kernels", DEFAULT_KERNELS)
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if config.normalization == "LayerNorm" else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def sums(self, hidden: Tensor) -> bool:
        """Return whether `forward` with `with_sum` saves a pass over these hidden states."""
        return self.bias is None and self.kernels.uses_triton(hidden.device)

    def forward(self, hidden: Tensor, added: Tensor | None = None, with_sum: bool = False) -> Any:
        """Return the norm of `hidden`, [..., H] to the same shape.

        with_sum: return (hidden + added, its norm), see `summed_rms_norm`; for RMSNorm.
        """
        shape = self.weight.shape
        if with_sum:
            return summed_rms_norm(hidden, added, self.weight, self.eps, self.kernels)
        if self.bias is None:
            return rms_norm(hidden, self.weight, self.eps, self.kernels)
        return functional.layer_norm(hidden, shape, self.weight, self.bias, self.eps)
