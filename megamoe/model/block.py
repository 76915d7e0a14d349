"""The MoE layer in the place of a Megatron-Core block's MLP."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from megamoe.moe.layer import MoELayer


class MoEBlock(nn.Module):
    """Megatron-Core's MLP interface over our layer: [s, b, h] -> ([s, b, h], no bias).

    Megatron-Core's versions pass different keywords (pg_collection, name, ...); the layer needs none.
    """

    def __init__(self, config: Any, build: Callable[[], MoELayer], **unused: Any) -> None:
        super().__init__()
        self.layer = build()

    def forward(self, hidden_SBH: Tensor, *unused: Any, **also_unused: Any) -> tuple[Tensor, None]:
        """The tokens of the micro batch are taken position by position: token s * B + b."""
        hidden_TH = hidden_SBH.reshape(-1, hidden_SBH.shape[-1])
        return self.layer(hidden_TH).view_as(hidden_SBH), None
