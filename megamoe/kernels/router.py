"""Scores, softmax, top-k, weights and masking of a router, and the sums that auxiliary losses and metrics
need.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from megamoe.kernels.autograd import Function, once_differentiable
from megamoe.kernels.choice import Kernels
from megamoe.kernels.library import Library

if TYPE_CHECKING:
    from megamoe.kernels.triton import TritonKernels

FEW_CHOICES = 16  # above it, sorting is faster
FEW_EXPERTS = 15  # above it, PyTorch's vectorised softmax is faster
MOST_EXPERTS = 512  # a block of more, with 64 tokens, would not fit into a GPU's registers
SMALLEST_TOTAL = 1e-20  # the least sum of p to divide by; with fp32's smallest number backward would overflow
SMALL_TOTAL = 1e-15  # the p of smaller sums may have underflowed, or `sqrt_softplus` has bounded them


def scores(hidden_TH: Tensor, weight_EH: Tensor, kernels: Kernels) -> Tensor:
    """Return hidden_TH weight_EH^T in fp32, [T, E], whatever the dtypes."""
    chosen = kernels.triton_for(hidden_TH)
    if chosen is None or not weight_EH.is_contiguous():
        return functional.linear(hidden_TH.float(), weight_EH.float())
    return _Scores.apply(hidden_TH, weight_EH, chosen)


class _Scores(Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_EH: Tensor, kernels: "TritonKernels") -> Tensor:
        ctx.save_for_backward(hidden_TH, weight_EH)
        ctx.kernels = kernels
        sizes = (len(hidden_TH), weight_EH.shape[0], weight_EH.shape[1])
        scores_TE = hidden_TH.new_empty(sizes[:2], dtype=torch.float32)
        kernels.router_scores(hidden_TH, weight_EH, *sizes, scores_TE)
        return scores_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TE: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_TH, weight_EH = ctx.saved_tensors
        to_hidden_TH = torch.empty_like(hidden_TH)
        to_weight_EH = torch.empty_like(weight_EH)
        operands = (gradient_TE.contiguous(), hidden_TH, weight_EH, len(hidden_TH), *weight_EH.shape)
        ctx.kernels.router_scores_backward(*operands, to_hidden_TH, to_weight_EH)
        return to_hidden_TH, to_weight_EH, None


def renormalised_weights(
    probs_TE: Tensor,
    scores_TE: Tensor,
    expert_TK: Tensor,
    slope: float | None,
    scale: float,
    kernels: Kernels,
) -> Tensor:
    """Return scale * p / the sum of the chosen p of the chosen experts, fp32 [T, K]; see `shares`.

    expert_TK: int64, distinct experts of each token. slope: log p is slope * score + a constant of the token,
    where p is below SMALL_TOTAL; None: no sum is so small, or that is not known.
    """
    chosen = kernels.triton_for(probs_TE)
    if chosen is None or probs_TE.dtype != torch.float32 or probs_TE.shape[1] > MOST_EXPERTS:
        logs = None if slope is None else lambda: slope * scores_TE.gather(1, expert_TK)
        return shares(probs_TE.gather(1, expert_TK), logs) * scale
    scores = None if slope is None else scores_TE.contiguous()
    return _Renormalised.apply(probs_TE, scores, expert_TK.contiguous(), slope or 0.0, scale, chosen)


def shares(prob_TK: Tensor, logs: Callable[[], Tensor] | None) -> Tensor:
    """Return each p over the sum of its row, [T, K].

    logs: returns log p up to a constant of the row, with gradient, all finite. Shares of a row whose sum is
    below SMALL_TOTAL are computed from them, since p may have underflowed. None: such a sum is taken to be at
    least SMALLEST_TOTAL.
    """
    total_T1 = prob_TK.sum(dim=-1, keepdim=True)
    share_TK = prob_TK / total_T1.clamp_min(SMALLEST_TOTAL)
    if logs is None or none_small(total_T1):
        return share_TK
    return torch.where(total_T1 < SMALL_TOTAL, logs().softmax(dim=-1), share_TK)


def none_small(total: Tensor) -> bool:
    """Return whether no sum is below SMALL_TOTAL, if the host knows that without a wait: on the CPU."""
    return total.device.type == "cpu" and (not total.numel() or bool(total.detach().amin() >= SMALL_TOTAL))


class _Renormalised(Function):
    @staticmethod
    def forward(
        ctx: Any,
        probs_TE: Tensor,
        scores_TE: Tensor | None,
        expert_TK: Tensor,
        slope: float,
        scale: float,
        kernels: "TritonKernels",
    ) -> Tensor:
        ctx.save_for_backward(probs_TE, scores_TE, expert_TK)
        sizes = (*_sizes(probs_TE), expert_TK.shape[1])
        ctx.kernels, numbers = kernels, (*sizes, SMALLEST_TOTAL, SMALL_TOTAL, slope, scale)
        ctx.numbers = numbers
        weight_TK = torch.empty_like(expert_TK, dtype=torch.float32)
        kernels.chosen_weights(probs_TE, scores_TE, expert_TK, *numbers, weight_TK)
        return weight_TK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TK: Tensor) -> tuple[Tensor | None, ...]:
        probs_TE, scores_TE, expert_TK = ctx.saved_tensors
        to_probs_TE = torch.empty_like(probs_TE)
        to_scores_TE = None if scores_TE is None else torch.empty_like(scores_TE)
        read = (gradient_TK.contiguous(), probs_TE, scores_TE, expert_TK)
        ctx.kernels.chosen_weights_backward(*read, *ctx.numbers, to_probs_TE, to_scores_TE)
        return to_probs_TE, to_scores_TE, None, None, None, None


def softmax(scores_TE: Tensor, kernels: Kernels) -> Tensor:
    """Return the softmax of each row, [T, E] in the same dtype; NaN if all of a row are -inf."""
    library = _library_for(scores_TE, kernels)
    if library is None or scores_TE.shape[-1] > FEW_EXPERTS:
        return scores_TE.softmax(dim=-1)
    return _Softmax.apply(scores_TE, library)


class _Softmax(Function):
    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, library: Library) -> Tensor:
        probs_TE = torch.empty_like(scores_TE)
        library.softmax(scores_TE, *_sizes(scores_TE), probs_TE)
        ctx.save_for_backward(probs_TE)
        ctx.library = library
        return probs_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TE: Tensor) -> tuple[Tensor, None]:
        (probs_TE,) = ctx.saved_tensors
        to_scores_TE = torch.empty_like(probs_TE)
        arguments = (gradient_TE.contiguous(), probs_TE, *_sizes(probs_TE), to_scores_TE)
        ctx.library.softmax_backward(*arguments)
        return to_scores_TE, None


def masked_softmax(scores_TE: Tensor, kept_TE: Tensor | None, kernels: Kernels) -> Tensor:
    """Return the softmax of each row over what is kept, see `masked`, and 0 for the rest."""
    probs_TE = softmax(masked(scores_TE, kept_TE, float("-inf"), kernels), kernels)
    return masked(probs_TE, kept_TE, 0.0, kernels)  # a row of which nothing is kept is NaN


def top_k(ranking_TE: Tensor, count: int, kernels: Kernels) -> Tensor:
    """Return the indices of each row's `count` largest values, in descending order: int64 [T, count].

    NaN counts as the largest. Among equal values the first is taken.
    """
    chosen = _library_for(ranking_TE, kernels) or _kernels_for(ranking_TE, kernels)
    if chosen is None or not 0 < count <= min(FEW_CHOICES, ranking_TE.shape[1]):
        return largest(ranking_TE, count)
    chosen_TK = ranking_TE.new_empty(len(ranking_TE), count, dtype=torch.int64)
    chosen.top_k(ranking_TE, *_sizes(ranking_TE), count, chosen_TK)
    return chosen_TK


def largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest values of the last dimension, in descending order, int64.

    NaN counts as the largest. Among equal values the first is taken, on every device: PyTorch's `topk`
    promises no order, and its kernels for CPU and CUDA differ.
    """
    values = values.detach()
    if values.dtype != torch.float32:
        return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    # Half as long as a stable sort: topk of whole numbers in the floats' order, made different by the place.
    bits = (values + 0.0).contiguous().view(torch.int32)  # -0.0 + 0.0 is 0.0
    ascending = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ascending = ascending.masked_fill(values.isnan(), 1 << 31)
    size = values.shape[-1]
    place = torch.arange(size - 1, -1, -1, device=values.device)
    return (ascending * size + place).topk(count, dim=-1).indices


def masked(values_TE: Tensor, kept_TE: Tensor | None, otherwise: float, kernels: Kernels) -> Tensor:
    """Return the values where `kept_TE` (bool; None: everywhere) is True, and `otherwise` elsewhere."""
    if kept_TE is None:
        return values_TE
    library = _library_for(values_TE, kernels)
    if library is None or values_TE.shape != kept_TE.shape:
        return values_TE.masked_fill(~kept_TE, otherwise)
    return _Masked.apply(values_TE, kept_TE.contiguous(), otherwise, library)


class _Masked(Function):
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
    library.masked(values_TE, kept_TE, values_TE.numel(), otherwise, result_TE)
    return result_TE


def _sizes(scores_TE: Tensor) -> tuple[int, int]:
    """Return the numbers of tokens and experts."""
    return len(scores_TE), scores_TE.shape[1]


def _library_for(scores_TE: Tensor, kernels: Kernels) -> Library | None:
    """Return the library if it supports these tensors, else None."""
    fits = scores_TE.dtype == torch.float32 and scores_TE.dim() == 2 and scores_TE.shape[1] > 0
    return kernels.library_for(scores_TE) if fits else None


MOST_EXPERTS_OF_SUMS = 512  # a block of more, with 32 tokens, would not fit into a GPU's registers
SMALLEST = torch.finfo(torch.float32).tiny


def mean_squared_log_sum(scores_TE: Tensor, kernels: Kernels) -> Tensor:
    """Return the mean over tokens of logsumexp(scores)^2, a scalar; 0 without tokens."""
    chosen = _kernels_for(scores_TE, kernels)
    if chosen is None:
        return plain_mean_squared_log_sum(scores_TE)
    return _MeanSquaredLogSum.apply(scores_TE, chosen)


def plain_mean_squared_log_sum(scores_TE: Tensor) -> Tensor:
    """Compute `mean_squared_log_sum` by PyTorch's operators."""
    # Not torch.logsumexp, which computes exp again in backward.
    top_T1 = scores_TE.detach().amax(dim=-1, keepdim=True)
    total_T = (scores_TE - top_T1).exp_().sum(dim=-1)
    return (total_T.log() + top_T1.squeeze(-1)).square().sum() / max(len(scores_TE), 1)


class _MeanSquaredLogSum(Function):
    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, kernels: "TritonKernels") -> Tensor:
        mean, log_sum_T = scores_TE.new_empty(()), scores_TE.new_empty(len(scores_TE))
        kernels.z_loss(scores_TE, *_sizes(scores_TE), log_sum_T, mean)
        ctx.save_for_backward(scores_TE, log_sum_T)
        ctx.kernels = kernels
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        scores_TE, log_sum_T = ctx.saved_tensors
        to_scores_TE = torch.empty_like(scores_TE)
        arguments = (gradient.contiguous(), scores_TE, log_sum_T, *_sizes(scores_TE), to_scores_TE)
        ctx.kernels.z_loss_backward(*arguments)
        return to_scores_TE, None


def balance(probs_TE: Tensor, counts_E: Tensor, kernels: Kernels) -> Tensor:
    """Return E * sum_i f_i P_i, a scalar; 0 without tokens.

    P_i: the mean of p_i over the tokens, with gradient. f_i: expert i's share of counts_E (int64), without.
    """
    chosen = _kernels_for(probs_TE, kernels)
    if chosen is None:
        return plain_balance(probs_TE, counts_E)
    return _Balance.apply(probs_TE, counts_E, chosen)


def plain_balance(probs_TE: Tensor, counts_E: Tensor) -> Tensor:
    """Compute `balance` by PyTorch's operators."""
    fraction_E = counts_E.to(torch.float32) / counts_E.sum(dim=-1, keepdim=True).clamp_min(1)
    num_tokens, num_experts = probs_TE.shape
    return num_experts * (fraction_E * probs_TE.sum(dim=0)).sum() / max(num_tokens, 1)


class _Balance(Function):
    @staticmethod
    def forward(ctx: Any, probs_TE: Tensor, counts_E: Tensor, kernels: "TritonKernels") -> Tensor:
        loss, factor_E = probs_TE.new_empty(()), probs_TE.new_empty(probs_TE.shape[1])
        arguments = (probs_TE, counts_E.contiguous(), *_sizes(probs_TE), factor_E, loss)
        kernels.balance_loss(*arguments)
        ctx.save_for_backward(factor_E)
        ctx.num_tokens = len(probs_TE)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (factor_E,) = ctx.saved_tensors
        return (gradient * factor_E).expand(ctx.num_tokens, -1), None, None


@torch.no_grad()
def gate_sums(probs_TE: Tensor, token_N: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is observed of a gate: (entropy, top_1, width_D).

    entropy, top_1: the sums over tokens of -sum_i q_i ln q_i in nats, and of max_i q_i. q_i = p_i / sum_j p_j
    are a token's shares over its candidates; p may be a softmax, sigmoids or another score function's values.
    width_D: int64 [E + 1], the number of tokens that have d pairs, at place d; more than E count as E.
    probs_TE: fp32, at least 0. token_N: int64, the pairs' tokens, ascending.
    """
    chosen = _kernels_for(probs_TE, kernels)
    if chosen is None:
        return plain_gate_sums(probs_TE, token_N)
    sums_2 = probs_TE.new_empty(2)
    width_D = token_N.new_empty(probs_TE.shape[1] + 1)
    arguments = (probs_TE.detach(), token_N.contiguous(), *_sizes(probs_TE), len(token_N), sums_2, width_D)
    chosen.gate_sums(*arguments)
    entropy, top_1 = sums_2.unbind()
    return entropy, top_1, width_D


def plain_gate_sums(probs_TE: Tensor, token_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `gate_sums` by PyTorch's operators."""
    num_tokens, num_experts = probs_TE.shape
    # Tables may name an expert twice for a token.
    width_T = _counted(token_N, num_tokens).clamp_(max=num_experts)
    total_T = probs_TE.sum(1).clamp_(min=SMALLEST)
    entropy_T = torch.addcdiv(total_T.log(), _minus_p_ln_p(probs_TE).sum(1), total_T)
    top_1 = (probs_TE.amax(1) / total_T).sum()
    return entropy_T.sum(), top_1, _counted(width_T, num_experts + 1)


def _minus_p_ln_p(probs_TE: Tensor) -> Tensor:
    """Return -p ln p, 0 at p = 0; on the CPU `log` uses vector instructions and `entr` does not."""
    if probs_TE.device.type == "cpu":
        return probs_TE.clamp(min=SMALLEST).log_().mul_(probs_TE).neg_()
    return torch.special.entr(probs_TE)


def _counted(index_N: Tensor, size: int) -> Tensor:
    return index_N.new_zeros(size).scatter_add_(0, index_N, torch.ones_like(index_N))


def _kernels_for(numbers_TE: Tensor, kernels: Kernels) -> "TritonKernels | None":
    """Return Triton's kernels if they support these numbers, else None."""
    fits = numbers_TE.dtype == torch.float32 and 0 < numbers_TE.shape[1] <= MOST_EXPERTS_OF_SUMS
    return kernels.triton_for(numbers_TE) if fits else None
