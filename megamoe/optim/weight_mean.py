"""The exponential mean of the weights (Polyak averaging with a decay), of what the optimizer steps on."""

from collections.abc import Iterable

import torch
from torch import Tensor


class WeightMean:
    """M <- d M + (1 - d) W after each step that is applied; M begins as the W of the first one.

    The tensors are those of the optimizer: ZeRO 1 to 3 thus partition the mean as the masters, and it lies
    where these lie. It is in fp32 whatever they are: bf16 would round (1 - d) W away. of: the mean of each
    tensor.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.of: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def update(self, tensors: Iterable[Tensor]) -> None:
        """Take in the weights after a step."""
        for tensor in tensors:
            if tensor in self.of:
                self.of[tensor].lerp_(tensor.detach().float(), 1 - self.decay)
            else:
                self.of[tensor] = tensor.detach().to(torch.float32, copy=True)
