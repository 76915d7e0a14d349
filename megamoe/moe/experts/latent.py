"""The projections between the hidden space and the smaller space of latent experts."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from megamoe.moe import rng


class LatentProjection(nn.Module):
    """y = W x, from the hidden size to the latent one before the dispatch, or back after the combine.

    Routed experts then compute rows of the latent size L in place of the hidden size H, and the exchange
    sends these: it shrinks by H / L. Router and shared experts read the hidden states.

    std, init_scale: of the initial weight, see `rng.init_weight`; it depends on (seed, layer, name) alone.

    Source: Nemotron 3 (NVIDIA 2025), LatentMoE; its projections have no biases.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        *,
        name: str,
        std: float,
        init_scale: float | None,
        seed: int,
        layer: int,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        rng.init_weight(self.weight, rng.key(seed, 0, layer, name), std, init_scale)

    def forward(self, rows_TI: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return functional.linear(rows_TI, self.weight)
