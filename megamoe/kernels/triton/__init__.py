"""The kernels for CUDA, written in Triton; a file for each family.

Each has the arguments of the compiled CPU kernel of the same name (`cpu/`), and a plain form in PyTorch in
the module that calls it. Numbers are fp32, bf16 or fp16, and sums are fp32. Offsets of rows are computed in
64 bits, because a tensor may have more than 2^31 numbers.
"""

import torch
from torch import Tensor

from megamoe.kernels.experts.order import ends_of
from megamoe.kernels.triton import block, products, router, router_sums, rows
from megamoe.kernels.triton import cross_entropy as losses
from megamoe.kernels.triton import experts as ffn


class TritonKernels:
    """The kernels for CUDA. The tensors of a call are contiguous, and on one device.

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

    def keeps_activated(self, dtype: torch.dtype) -> bool:
        """Return whether `experts` writes the activated rows, which are then an argument."""
        return True

    combine = staticmethod(rows.combine)
    combine_backward = staticmethod(rows.combine_backward)
    group_pairs = staticmethod(rows.group_pairs)
    swiglu = staticmethod(ffn.swiglu)
    swiglu_backward = staticmethod(ffn.swiglu_backward)
    experts = staticmethod(ffn.experts)
    experts_backward = staticmethod(ffn.experts_backward)
    forward = staticmethod(products.forward)
    to_rows = staticmethod(products.to_rows)
    to_weight = staticmethod(products.to_weight)
    rms_norm = staticmethod(block.rms_norm)
    rms_norm_backward = staticmethod(block.rms_norm_backward)
    rotate = staticmethod(block.rotate)
    rotate_both = staticmethod(block.rotate_both)
    router_scores = staticmethod(router.scores)
    router_scores_backward = staticmethod(router.scores_backward)
    chosen_weights = staticmethod(router.chosen_weights)
    chosen_weights_backward = staticmethod(router.chosen_weights_backward)
    top_k = staticmethod(router.top_k)
    z_loss = staticmethod(router_sums.z_loss)
    z_loss_backward = staticmethod(router_sums.z_loss_backward)
    balance_loss = staticmethod(router_sums.balance_loss)
    gate_sums = staticmethod(router_sums.gate_sums)
    cross_entropy = staticmethod(losses.statistics)
    cross_entropy_backward = staticmethod(losses.gradient)
