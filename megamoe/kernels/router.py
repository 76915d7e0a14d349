"""Scores, softmax, top-k, weights and masking of a router.

On the CPU the compiled library replaces PyTorch's softmax, top-k and mask: PyTorch takes 80 to 400 ns per
token for a softmax or top-k over few experts, and 2 to 3 ns per number for a mask. On CUDA Triton's kernels
replace the product with the router's matrix, which would need a copy of the tokens in fp32, and the weights
of the chosen experts, which would be twenty launches.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megamoe.kernels.choice import Kernels, RowKernels
from megamoe.kernels.library import Library

FEW_CHOICES = 16  # above it, sorting is faster
FEW_EXPERTS = 15  # above it, PyTorch's vectorised softmax is faster
MOST_EXPERTS = 512  # a block of more, with 64 tokens, would not fit into a GPU's registers


def scores(hidden_TH: Tensor, weight_EH: Tensor, kernels: Kernels) -> Tensor:
    """Return hidden_TH weight_EH^T in fp32, [T, E], whatever the dtypes."""
    chosen = kernels.rows_for(hidden_TH) if kernels.uses_triton(hidden_TH.device) else None
    if chosen is None or not weight_EH.is_contiguous():
        return functional.linear(hidden_TH.float(), weight_EH.float())
    scores_TE: Tensor = _Scores.apply(hidden_TH, weight_EH, chosen)
    return scores_TE


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_EH: Tensor, kernels: RowKernels) -> Tensor:
        ctx.save_for_backward(hidden_TH, weight_EH)
        ctx.kernels = kernels
        sizes = (len(hidden_TH), *weight_EH.shape)
        scores_TE = hidden_TH.new_empty(sizes[:2], dtype=torch.float32)
        kernels.call("router_scores", hidden_TH.dtype, hidden_TH, weight_EH, *sizes, scores_TE)
        return scores_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TE: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_TH, weight_EH = ctx.saved_tensors
        to_hidden_TH = torch.empty_like(hidden_TH)
        to_weight_EH = torch.empty_like(weight_EH)
        sides = (gradient_TE.contiguous(), hidden_TH, weight_EH, len(hidden_TH), *weight_EH.shape)
        ctx.kernels.call("router_scores_backward", hidden_TH.dtype, *sides, to_hidden_TH, to_weight_EH)
        return to_hidden_TH, to_weight_EH, None


def renormalised_weights(
    probs_TE: Tensor, expert_TK: Tensor, smallest: float, scale: float, kernels: Kernels
) -> Tensor:
    """Return scale * p / max(the sum of the chosen p, smallest) of the chosen experts, fp32 [T, K].

    expert_TK: int64, distinct experts of each token.
    """
    chosen = kernels.rows_for(probs_TE) if kernels.uses_triton(probs_TE.device) else None
    if chosen is None or probs_TE.dtype != torch.float32 or probs_TE.shape[1] > MOST_EXPERTS:
        weight_TK = probs_TE.gather(1, expert_TK)
        total_T1 = weight_TK.sum(dim=-1, keepdim=True)
        return weight_TK / total_T1.clamp_min(smallest) * scale
    weights_TK: Tensor = _Renormalised.apply(probs_TE, expert_TK.contiguous(), smallest, scale, chosen)
    return weights_TK


class _Renormalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, probs_TE: Tensor, expert_TK: Tensor, smallest: float, scale: float, kernels: RowKernels
    ) -> Tensor:
        ctx.save_for_backward(probs_TE, expert_TK)
        ctx.kernels, ctx.numbers = kernels, (*probs_TE.shape, expert_TK.shape[1], smallest, scale)
        weight_TK = torch.empty_like(expert_TK, dtype=torch.float32)
        kernels.call("chosen_weights", probs_TE.dtype, probs_TE, expert_TK, *ctx.numbers, weight_TK)
        return weight_TK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TK: Tensor) -> tuple[Tensor | None, ...]:
        probs_TE, expert_TK = ctx.saved_tensors
        to_probs_TE = torch.empty_like(probs_TE)
        arguments = (gradient_TK.contiguous(), probs_TE, expert_TK, *ctx.numbers, to_probs_TE)
        ctx.kernels.call("chosen_weights_backward", probs_TE.dtype, *arguments)
        return to_probs_TE, None, None, None, None


def softmax(scores_TE: Tensor, kernels: Kernels) -> Tensor:
    """Return the softmax of each row, [T, E] in the same dtype; NaN if all of a row are -inf."""
    library = _library_for(scores_TE, kernels)
    if library is None or scores_TE.shape[-1] > FEW_EXPERTS:
        return scores_TE.softmax(dim=-1)
    probs_TE: Tensor = _Softmax.apply(scores_TE, library)
    return probs_TE


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, library: Library) -> Tensor:
        probs_TE = torch.empty_like(scores_TE)
        library.call("softmax", scores_TE.dtype, scores_TE, *scores_TE.shape, probs_TE)
        ctx.save_for_backward(probs_TE)
        ctx.library = library
        return probs_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TE: Tensor) -> tuple[Tensor, None]:
        (probs_TE,) = ctx.saved_tensors
        to_scores_TE = torch.empty_like(probs_TE)
        arguments = (gradient_TE.contiguous(), probs_TE, *probs_TE.shape, to_scores_TE)
        ctx.library.call("softmax_backward", probs_TE.dtype, *arguments)
        return to_scores_TE, None


def top_k(ranking_TE: Tensor, count: int, kernels: Kernels) -> Tensor:
    """Return the indices of each row's `count` largest values, in descending order: int64 [T, count].

    NaN counts as the largest. Among equal values the library takes the first; PyTorch guarantees no order.
    """
    library = _library_for(ranking_TE, kernels)
    if library is None or not 0 < count <= min(FEW_CHOICES, ranking_TE.shape[1]):
        return ranking_TE.topk(count, dim=-1).indices
    chosen_TK = ranking_TE.new_empty(len(ranking_TE), count, dtype=torch.int64)
    library.call("top_k", ranking_TE.dtype, ranking_TE, *ranking_TE.shape, count, chosen_TK)
    return chosen_TK


def masked(values_TE: Tensor, kept_TE: Tensor, otherwise: float, kernels: Kernels) -> Tensor:
    """Return the values where `kept_TE` (bool) is True, and `otherwise` elsewhere, [T, E]."""
    library = _library_for(values_TE, kernels)
    if library is None or values_TE.shape != kept_TE.shape:
        return values_TE.masked_fill(~kept_TE, otherwise)
    result_TE: Tensor = _Masked.apply(values_TE, kept_TE.contiguous(), otherwise, library)
    return result_TE


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_TE: Tensor, kept_TE: Tensor, otherwise: float, library: Library) -> Tensor:
        ctx.save_for_backward(kept_TE)
        ctx.library = library
        return _masked(values_TE, kept_TE, otherwise, library)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TE: Tensor) -> tuple[Tensor, None, None, None]:
        (kept_TE,) = ctx.saved_tensors
        return _masked(gradient_TE.contiguous(), kept_TE, 0.0, ctx.library), None, None, None


def _masked(values_TE: Tensor, kept_TE: Tensor, otherwise: float, library: Library) -> Tensor:
    result_TE = torch.empty_like(values_TE)
    library.call("masked", values_TE.dtype, values_TE, kept_TE, values_TE.numel(), otherwise, result_TE)
    return result_TE


def _library_for(scores_TE: Tensor, kernels: Kernels) -> Library | None:
    """Return the library if it supports these tensors, else None."""
    fits = scores_TE.dtype == torch.float32 and scores_TE.dim() == 2 and scores_TE.shape[1] > 0
    return kernels.library_for(scores_TE) if fits else None
