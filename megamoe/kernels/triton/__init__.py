"""The kernels for CUDA, written in Triton; a file for each family.

Each has the arguments of the compiled CPU kernel of the same name (`cpu/`), and a plain form in PyTorch in
the module that calls it. Numbers are fp32, bf16 or fp16, and sums are fp32. Offsets of rows are computed in
64 bits, because a tensor may have more than 2^31 numbers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megamoe.kernels.experts.order import ends_of
from megamoe.kernels.triton import block, cross_entropy, experts, products, router, router_sums, rows


class TritonKernels:
    """The kernels for CUDA.

    On the CPU they run in Triton's interpreter (TRITON_INTERPRET=1 before its import).
    """

    dtypes = frozenset([torch.float32, torch.bfloat16, torch.float16])

    def rows_by_token(self, token_N: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return (the rows ordered by token [N], where the rows of each token end [T]), int64.

        It neither waits for the device nor checks the tokens: `gather` asserts on the device that they are
        valid.
        """
        sorted_N, row_N = torch.sort(token_N, stable=True)
        return row_N, ends_of(sorted_N, num_tokens)

    def call(self, name: str, dtype: torch.dtype, *arguments: Any) -> None:
        """Launch the kernel of that name. Its tensors are contiguous, on one device and of that dtype."""
        LAUNCHERS[name](*arguments)


LAUNCHERS: dict[str, Callable[..., None]] = {
    "combine": rows.combine,
    "combine_backward": rows.combine_backward,
    "swiglu": experts.swiglu,
    "swiglu_backward": experts.swiglu_backward,
    "forward": products.forward,
    "to_rows": products.to_rows,
    "to_weight": products.to_weight,
    "experts": experts.experts,
    "experts_backward": experts.experts_backward,
    "rms_norm": block.rms_norm,
    "rms_norm_backward": block.rms_norm_backward,
    "summed_rms_norm": block.summed_rms_norm,
    "summed_rms_norm_backward": block.summed_rms_norm_backward,
    "rotate": block.rotate,
    "router_scores": router.scores,
    "router_scores_backward": router.scores_backward,
    "chosen_weights": router.chosen_weights,
    "chosen_weights_backward": router.chosen_weights_backward,
    "z_loss": router_sums.z_loss,
    "z_loss_backward": router_sums.z_loss_backward,
    "balance_loss": router_sums.balance_loss,
    "gate_sums": router_sums.gate_sums,
    "group_pairs": rows.group_pairs,
    "cross_entropy": cross_entropy.statistics,
    "cross_entropy_backward": cross_entropy.gradient,
}
