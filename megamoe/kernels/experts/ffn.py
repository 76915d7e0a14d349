"""The experts' FFNs as one operation over rows grouped by expert, with biases and gpt-oss's clamped
SwiGLU.
"""

from typing import Any

import torch
from torch import Tensor

from megamoe.kernels.autograd import Function, once_differentiable
from megamoe.kernels.choice import Kernels, RowKernels
from megamoe.kernels.experts.grouped_gemm import (
    DelayedWeightGradients,
    checked_ends,
    grouped_product,
    product_library,
)
from megamoe.kernels.experts.rows import swiglu, weighted_swiglu
from megamoe.kernels.library import Library


def experts_of_rows(counts_E: Tensor, num_rows: int) -> Tensor:
    """Return the expert of each of `num_rows` rows grouped by expert, int64; counts_E: int64."""
    expert_E = torch.arange(len(counts_E), device=counts_E.device)
    return torch.repeat_interleave(expert_E, counts_E, output_size=num_rows)


def add_expert_bias(rows_NG: Tensor, bias_EG: Tensor, expert_N: Tensor) -> Tensor:
    """Return the rows with their expert's bias added, [N, G]; expert_N: int64."""
    return expert_rows(bias_EG, expert_N).to(rows_NG.dtype).add_(rows_NG)


def expert_rows(weight_EG: Tensor, expert_N: Tensor) -> Tensor:
    """Return the weight of each row's expert, [N, G]; expert_N: int64."""
    return _ExpertRows.apply(weight_EG, expert_N)


class _ExpertRows(Function):
    """PyTorch's own backward of a row lookup adds atomically on CUDA, in the rows' dtype and in an order that
    varies. In bf16 a sum of some thousand rows then misses much of itself.

    Here the gradient is a product, [E, N] of zeros and ones times [N, G], which adds in fp32.
    """

    @staticmethod
    def forward(ctx: Any, weight_EG: Tensor, expert_N: Tensor) -> Tensor:
        ctx.save_for_backward(expert_N)
        ctx.num_experts = len(weight_EG)
        return weight_EG.index_select(0, expert_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NG: Tensor) -> tuple[Tensor, None]:
        (expert_N,) = ctx.saved_tensors
        return _sum_of_experts(gradient_NG, expert_N, ctx.num_experts), None


def _sum_of_experts(rows_NG: Tensor, expert_N: Tensor, num_experts: int) -> Tensor:
    expert_E1 = torch.arange(num_experts, device=expert_N.device)[:, None]
    return (expert_N == expert_E1).to(rows_NG.dtype) @ rows_NG


LIMIT = 7.0
STEEPNESS = 1.702
OFFSET = 1.0


def clamped_swiglu(rows_N2F: Tensor) -> Tensor:
    """[..., 2F] of [gate | value] halves -> [..., F] in the same dtype; computed in fp32."""
    return _ClampedSwiGLU.apply(rows_N2F)


def plain_clamped_swiglu(rows_N2F: Tensor) -> Tensor:
    """Compute `clamped_swiglu` by PyTorch's operators, in the dtype of the rows."""
    gate, value = rows_N2F.chunk(2, dim=-1)
    return steep_silu(gate.clamp(max=LIMIT)) * (value.clamp(-LIMIT, LIMIT) + OFFSET)


def steep_silu(gate: Tensor) -> Tensor:
    """Return g sigmoid(1.702 g), which approximates GELU (Hendrycks and Gimpel 2016)."""
    return gate * torch.sigmoid(STEEPNESS * gate)


class _ClampedSwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, rows_N2F: Tensor) -> Tensor:
        ctx.save_for_backward(rows_N2F)
        return plain_clamped_swiglu(rows_N2F.float()).to(rows_N2F.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NF: Tensor) -> Tensor:
        (rows_N2F,) = ctx.saved_tensors
        gate, value = rows_N2F.float().chunk(2, dim=-1)
        inside = gate <= LIMIT, value.abs() <= LIMIT
        gate, value = gate.clamp(max=LIMIT), value.clamp(-LIMIT, LIMIT) + OFFSET
        share = torch.sigmoid(STEEPNESS * gate)
        sent = gradient_NF.float()
        to_gate = sent * value * share * (1 + STEEPNESS * gate * (1 - share))
        to_value = sent * gate * share
        return torch.cat([to_gate * inside[0], to_value * inside[1]], dim=-1).to(rows_N2F.dtype)


def swiglu_experts(
    rows_NH: Tensor,
    up_EGH: Tensor,
    down_EHF: Tensor,
    counts_E: Tensor,
    kernels: Kernels,
    delayed: DelayedWeightGradients | None = None,
    weight_N: Tensor | None = None,
) -> Tensor:
    """Apply its expert to each row: down * SwiGLU(up * row), [N, H] to [N, H]; G = 2F, gate over value.

    counts_E: int64, the number of rows of each expert, N in total. Any of them may be 0. delayed: computes
    the weights' gradients; not where one pass of kernels computes all gradients (`is_one_pass`). weight_N:
    fp32, multiplies SwiGLU's rows and thereby the output's; its gradient needs no output.

    Raises:
        ValueError: if the weights do not fit the rows or each other, or the counts do not fit the rows, as in
            `grouped_product`.
    """
    rows_NH = rows_NH.contiguous()
    library = _library_for(rows_NH, up_EGH, down_EHF, kernels, weight_N is not None)
    if library is None:
        return plain_swiglu_experts(rows_NH, up_EGH, down_EHF, counts_E, kernels, delayed, weight_N)
    ends_E = checked_ends(rows_NH, up_EGH, counts_E)
    if weight_N is not None:
        weight_N = weight_N.contiguous()
    return _Experts.apply(rows_NH, up_EGH, down_EHF, ends_E, weight_N, library, kernels)


def is_one_pass(
    rows_NH: Tensor, up_EGH: Tensor, down_EHF: Tensor, kernels: Kernels, is_weighted: bool = False
) -> bool:
    """Return whether `swiglu_experts` is one pass of kernels, which does not keep the activated rows."""
    return _library_for(rows_NH.contiguous(), up_EGH, down_EHF, kernels, is_weighted) is not None


def plain_swiglu_experts(
    rows_NH: Tensor,
    up_EGH: Tensor,
    down_EHF: Tensor,
    counts_E: Tensor,
    kernels: Kernels,
    delayed: DelayedWeightGradients | None = None,
    weight_N: Tensor | None = None,
) -> Tensor:
    """Compute `swiglu_experts` in its three steps."""
    rows_NG = grouped_product(rows_NH, up_EGH, counts_E, kernels, delayed)
    rows_NF = swiglu(rows_NG, kernels) if weight_N is None else weighted_swiglu(rows_NG, weight_N, kernels)
    return grouped_product(rows_NF, down_EHF, counts_E, kernels, delayed)


class _Experts(Function):
    """The kernels' forward and backward pass. It saves the weights themselves, for the reason of
    `_GroupedProduct`.

    The backward pass overwrites the first product. A second one (retain_graph) computes it again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        up: Tensor,
        down: Tensor,
        ends: Tensor,
        weight_N: Tensor | None,
        library: RowKernels,
        kernels: Kernels,
    ) -> Tensor:
        hidden, output = rows.new_empty(len(rows), up.shape[1]), torch.empty_like(rows)
        active = rows.new_empty(len(rows) if library.keeps_activated(rows.dtype) else 0, down.shape[2])
        operands = (rows, up.contiguous(), down.contiguous(), ends, *_sizes(down))
        if weight_N is None:
            library.experts(*operands, hidden, active, output)
        else:
            assert not isinstance(library, Library)
            library.experts(*operands, hidden, active, output, weight_N)
        ctx.save_for_backward(rows, up, down, ends, hidden, weight_N)
        ctx.library, ctx.kernels, ctx.was_written = library, kernels, False
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, up, down, ends, hidden, weight_N = ctx.saved_tensors
        library: RowKernels = ctx.library
        if ctx.was_written:
            counts = torch.diff(ends, prepend=ends.new_zeros(1))
            hidden = grouped_product(rows, up, counts, ctx.kernels)
        ctx.was_written = True
        active = rows.new_empty(len(rows), down.shape[2])
        wanted = zip((rows, up, down), ctx.needs_input_grad, strict=False)
        gradients = [torch.empty_like(each) if needed else None for each, needed in wanted]
        operands = (gradient.contiguous(), rows, up.contiguous(), down.contiguous())
        arguments = (*operands, ends, *_sizes(down), hidden.data, active)
        to_weight_N = None
        if weight_N is None:
            library.experts_backward(*arguments, *gradients)
        else:
            assert not isinstance(library, Library)
            to_weight_N = torch.empty_like(weight_N)
            to_rows, to_up, to_down = gradients
            library.experts_backward(*arguments, to_rows, to_up, to_down, weight_N, to_weight_N)
        return *gradients, None, to_weight_N, None, None


def _sizes(down: Tensor) -> tuple[int, int, int]:
    experts, hidden_size, ffn_size = down.shape
    return experts, hidden_size, ffn_size


def _library_for(
    rows: Tensor, up: Tensor, down: Tensor, kernels: Kernels, is_weighted: bool = False
) -> RowKernels | None:
    """Return the kernels that support these tensors, else None; the compiled ones know no weights."""
    alike = rows.dtype == up.dtype == down.dtype
    fits = alike and up.shape == (len(down), 2 * down.shape[2], down.shape[1])
    library = product_library(rows, up.shape, kernels)
    fits &= not (is_weighted and isinstance(library, Library))
    return library if fits and product_library(rows, down.shape, kernels) is not None else None
