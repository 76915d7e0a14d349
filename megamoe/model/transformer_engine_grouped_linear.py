"""The grouped products of the experts by Transformer Engine, in BF16, FP32 or FP8."""

import torch
from torch import Tensor, nn

from megamoe.model.backends import FP8_MULTIPLE
from megamoe.moe.experts.grouped import Products


class EngineProduct(nn.Module):
    """Transformer Engine's GroupedLinear without parameters of its own: a `GroupedProduct`.

    Its weights are views of the stacked one, set for each call, so that names, ZeRO's partitions, expert
    parallelism and checkpoints know of stacked weights alone; the gradients of the views are stacked into the
    weight's. What stays here between calls are the FP8 scales. Each weight needs one of its own.
    """

    def __init__(self, num_experts: int, in_size: int, out_size: int) -> None:
        from transformer_engine.pytorch import GroupedLinear

        super().__init__()
        self.linear = GroupedLinear(
            num_experts,
            in_size,
            out_size,
            bias=False,
            init_method=lambda weight: None,
            params_dtype=torch.float32,
            device="cpu",
        )
        self.names = [f"weight{number}" for number in range(num_experts)]
        for name in self.names:
            delattr(self.linear, name)

    def forward(self, rows_NI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
        """rows_NI of the weight's dtype, grouped by expert; counts_E int64 on the CPU -> [N, out]."""
        # Past nn.Module, which would take a leaf for a buffer or parameter of its own.
        held = self.linear.__dict__
        held.update(zip(self.names, weight_EOI.unbind(0), strict=True))
        try:
            rows_NO: Tensor = self.linear(rows_NI, counts_E.tolist())
        finally:
            for name in self.names:
                del held[name]
        return rows_NO


def transformer_engine_grouped_linear(fp8: str) -> Products:
    """Products by Transformer Engine, whose FP8 wants an expert's rows in multiples; fp8: of model.fp8."""
    return Products(EngineProduct, row_multiple=FP8_MULTIPLE.get(fp8, 1), host_counts=True)
