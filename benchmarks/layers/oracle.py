"""What every candidate must compute: a plain loop over experts in fp32, independent of the library."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from layers.candidate import Candidate, Shape, Weights

# The largest error of a row, relative to the row's norm.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
# A token is compared where its k-th score is above the next by this share of its largest score: under it,
# rounding decides which expert is chosen.
DECIDED = {torch.float32: 1e-4, torch.bfloat16: 2**-7}


@dataclass(frozen=True)
class Expected:
    """Output and input gradient, [rows, H] fp32, and the rows whose routing no rounding can change."""

    output: Tensor
    gradient: Tensor
    decided: Tensor

    def error(self, output: Tensor, gradient: Tensor) -> float:
        """Return the largest relative error of a decided row."""
        errors = [
            ((found.float() - right).norm(dim=1) / right.norm(dim=1))[self.decided]
            for found, right in ((output, self.output), (gradient, self.gradient))
        ]
        return float(torch.cat(errors).max())  # NaN if one is


def expected(
    candidate: Candidate, shape: Shape, dtype: torch.dtype, weights: Weights, rows: Tensor, upstream: Tensor
) -> Expected:
    """Return what a candidate must compute from these input rows and this gradient, [rows, H] each."""
    leaf = rows.detach().float().requires_grad_()
    decided = torch.ones(len(rows), dtype=torch.bool)
    if candidate.rows == "routed":
        scores_TE = leaf @ weights.router_EH.T
        weight_TE = routed_weights(scores_TE, shape.choices, candidate.weight_is_one)
        router_dtype = torch.float32 if candidate.router == "fp32" else dtype
        decided = decided_tokens(scores_TE.detach(), shape.choices, DECIDED[router_dtype])
    elif candidate.rows == "even":
        expert_N = torch.arange(shape.experts).repeat_interleave(shape.pairs // shape.experts)
        weight_TE = functional.one_hot(expert_N, shape.experts).float()
    else:
        weight_TE = (torch.arange(shape.experts) < shape.choices).float().expand(shape.tokens, -1)
    output = loop(leaf, weight_TE, weights)
    (gradient,) = torch.autograd.grad(output, leaf, upstream.float())
    return Expected(output.detach(), gradient, decided)


def routed_weights(scores_TE: Tensor, choices: int, weight_is_one: bool) -> Tensor:
    """Softmax and top-k -> [T, E], 0 where an expert is not chosen; raw at k = 1, else their sum is 1."""
    chosen = scores_TE.softmax(dim=1).topk(choices, dim=1)
    weight_TK = chosen.values
    if choices > 1 or weight_is_one:
        weight_TK = weight_TK / weight_TK.sum(dim=1, keepdim=True)
    return torch.zeros_like(scores_TE).scatter(1, chosen.indices, weight_TK)


def expert_counts(weights: Weights, hidden_TH: Tensor, choices: int) -> Tensor:
    """Return the number of pairs of every expert, int64 [E]."""
    expert_TK = (hidden_TH.float() @ weights.router_EH.T).topk(choices, dim=1).indices
    return expert_TK.flatten().bincount(minlength=len(weights.router_EH))


def decided_tokens(scores_TE: Tensor, choices: int, margin: float) -> Tensor:
    """Return which tokens have the same choice of experts after rounding, bool [T]."""
    if choices == scores_TE.shape[1]:
        return torch.ones(len(scores_TE), dtype=torch.bool)
    best_TK = scores_TE.topk(choices + 1, dim=1).values
    return best_TK[:, -2] - best_TK[:, -1] > margin * scores_TE.abs().amax(dim=1)


def loop(rows_TH: Tensor, weight_TE: Tensor, weights: Weights) -> Tensor:
    """Return the sum over experts of weight times the expert's output, one expert after the other."""
    outputs, tokens = [], []
    for expert, (up_GH, down_HF) in enumerate(zip(weights.up_EGH, weights.down_EHF, strict=True)):
        token_N = weight_TE[:, expert].nonzero()[:, 0]
        gate_NF, value_NF = (rows_TH[token_N] @ up_GH.T).chunk(2, dim=1)
        rows_NH = (functional.silu(gate_NF) * value_NF) @ down_HF.T
        outputs.append(rows_NH * weight_TE[token_N, expert, None])
        tokens.append(token_N)
    return torch.zeros_like(rows_TH).index_add(0, torch.cat(tokens), torch.cat(outputs))


def error_of(
    candidate: Candidate, module: nn.Module, shape: Shape, weights: Weights, rows: Tensor, upstream: Tensor
) -> float:
    """Return the largest relative error of the module's output and input gradient."""
    leaf = rows.detach().requires_grad_()
    output = module(leaf)
    output.backward(upstream)
    assert leaf.grad is not None
    right = expected(candidate, shape, rows.dtype, weights, rows.cpu(), upstream.cpu())
    return right.error(output.detach().cpu(), leaf.grad.cpu())
