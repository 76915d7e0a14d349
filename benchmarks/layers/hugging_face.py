"""Transformers' Mixtral block, by each of its ways to compute experts."""

from typing import Literal

import torch
from torch import Tensor, nn

from layers.candidate import NotMeasured, Shape, Weights

MOST_COPIED = 2 << 30  # bytes of weights that `batched_mm` may copy for its pairs


class MixtralBlock(nn.Module):
    """`MixtralSparseMoeBlock`; its scores are in the experts' dtype, and at k = 1 its weights are 1."""

    def __init__(self, way: str, shape: Shape, dtype: torch.dtype, weights: Weights) -> None:
        super().__init__()
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        config = MixtralConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn,
            num_local_experts=shape.experts,
            num_experts_per_tok=shape.choices,
            router_jitter_noise=0.0,
        )
        config._experts_implementation = way
        self.block = MixtralSparseMoeBlock(config)
        self.block.gate.weight.data.copy_(weights.router_EH)
        self.block.experts.gate_up_proj.data.copy_(weights.up_EGH)
        self.block.experts.down_proj.data.copy_(weights.down_EHF)
        self.block.to(dtype)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.block(hidden_TH[None])[0]


def build(
    way: Literal["eager", "grouped_mm", "batched_mm"], shape: Shape, dtype: torch.dtype, weights: Weights
) -> MixtralBlock:
    """Build the block.

    Raises:
        NotMeasured: if `batched_mm`, which copies an expert's weights for every pair, would copy too much.
    """
    copied = shape.pairs * 3 * shape.ffn * shape.hidden * dtype.itemsize
    if way == "batched_mm" and copied > MOST_COPIED:
        raise NotMeasured(f"copies {copied / 1e9:.0f} GB of weights for its pairs")
    return MixtralBlock(way, shape, dtype, weights)
