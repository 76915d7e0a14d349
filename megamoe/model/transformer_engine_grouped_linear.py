"""The grouped products of the experts by Transformer Engine, in BF16, FP32 or FP8."""

import torch
from torch import Tensor, nn

from megamoe.compat.transformer_engine_compat import FP8_MULTIPLE, LentWeights
from megamoe.moe.experts.grouped import Products


class EngineProduct(nn.Module):
    """Transformer Engine's GroupedLinear without parameters of its own: a `GroupedProduct`.

    Its weights are views of the stacked weight, set for each call, and their gradients are stacked into the
    weight's gradient. So names, ZeRO, expert parallelism and checkpoints see stacked weights only. Only the
    FP8 scales stay here between calls, so each weight needs its own product.
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
        self.weights = LentWeights(self.linear, num_experts)

    def forward(self, rows_NI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
        """rows_NI of the weight's dtype, grouped by expert; counts_E int64 on the CPU -> [N, out]."""
        with self.weights.lent(weight_EOI.unbind(0)) as linear:
            rows_NO: Tensor = linear(rows_NI, counts_E.tolist())
        return rows_NO


def transformer_engine_grouped_linear(fp8: str) -> Products:
    """Return the products by Transformer Engine; fp8: model.fp8, which needs padded rows."""
    return Products(EngineProduct, row_multiple=FP8_MULTIPLE.get(fp8, 1), host_counts=True)
