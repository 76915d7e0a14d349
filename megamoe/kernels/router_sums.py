"""Sums over a router's numbers: terms of auxiliary losses, and what is observed of the gate.

On CUDA each is one of Triton's operators. PyTorch's would be ten, each shorter than its launch. Sizes: T
tokens, E experts, N (token, expert) pairs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megamoe.kernels.choice import Kernels, RowKernels

MOST_EXPERTS = 512  # a block of more, with 32 tokens, would not fit into a GPU's registers
SMALLEST = torch.finfo(torch.float32).tiny


def mean_squared_log_sum(scores_TE: Tensor, kernels: Kernels) -> Tensor:
    """Return the mean over tokens of logsumexp(scores)^2, a scalar; 0 without tokens."""
    chosen = _kernels_for(scores_TE, kernels)
    if chosen is None:
        return plain_mean_squared_log_sum(scores_TE)
    mean: Tensor = _MeanSquaredLogSum.apply(scores_TE, chosen)
    return mean


def plain_mean_squared_log_sum(scores_TE: Tensor) -> Tensor:
    """Compute `mean_squared_log_sum` by PyTorch's operators."""
    # Not torch.logsumexp, which computes exp again in backward.
    top_T1 = scores_TE.detach().amax(dim=-1, keepdim=True)
    total_T = (scores_TE - top_T1).exp_().sum(dim=-1)
    return (total_T.log() + top_T1.squeeze(-1)).square().sum() / max(len(scores_TE), 1)


class _MeanSquaredLogSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, kernels: RowKernels) -> Tensor:
        mean, log_sum_T = scores_TE.new_empty(()), scores_TE.new_empty(len(scores_TE))
        kernels.call("z_loss", scores_TE.dtype, scores_TE, *scores_TE.shape, log_sum_T, mean)
        ctx.save_for_backward(scores_TE, log_sum_T)
        ctx.kernels = kernels
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        scores_TE, log_sum_T = ctx.saved_tensors
        to_scores_TE = torch.empty_like(scores_TE)
        arguments = (gradient.contiguous(), scores_TE, log_sum_T, *scores_TE.shape, to_scores_TE)
        ctx.kernels.call("z_loss_backward", scores_TE.dtype, *arguments)
        return to_scores_TE, None


def balance(probs_TE: Tensor, counts_E: Tensor, kernels: Kernels) -> Tensor:
    """Return E * sum_i f_i P_i, a scalar; 0 without tokens.

    P_i: the mean of p_i over the tokens, with gradient. f_i: expert i's share of counts_E (int64), without.
    """
    chosen = _kernels_for(probs_TE, kernels)
    if chosen is None:
        return plain_balance(probs_TE, counts_E)
    loss: Tensor = _Balance.apply(probs_TE, counts_E, chosen)
    return loss


def plain_balance(probs_TE: Tensor, counts_E: Tensor) -> Tensor:
    """Compute `balance` by PyTorch's operators."""
    fraction_E = counts_E.to(torch.float32) / counts_E.sum(dim=-1, keepdim=True).clamp_min(1)
    num_tokens, num_experts = probs_TE.shape
    return num_experts * (fraction_E * probs_TE.sum(dim=0)).sum() / max(num_tokens, 1)


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs_TE: Tensor, counts_E: Tensor, kernels: RowKernels) -> Tensor:
        loss, factor_E = probs_TE.new_empty(()), probs_TE.new_empty(probs_TE.shape[1])
        arguments = (probs_TE, counts_E.contiguous(), *probs_TE.shape, factor_E, loss)
        kernels.call("balance_loss", probs_TE.dtype, *arguments)
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
    arguments = (probs_TE.detach(), token_N.contiguous(), *probs_TE.shape, len(token_N), sums_2, width_D)
    chosen.call("gate_sums", probs_TE.dtype, *arguments)
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


def _kernels_for(numbers_TE: Tensor, kernels: Kernels) -> RowKernels | None:
    """Return Triton's kernels if they support these numbers, else None."""
    if not kernels.uses_triton(numbers_TE.device) or numbers_TE.dtype != torch.float32:
        return None
    return kernels.rows_for(numbers_TE) if 0 < numbers_TE.shape[1] <= MOST_EXPERTS else None
