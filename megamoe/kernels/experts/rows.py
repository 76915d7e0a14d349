"""Permutation, activation and combination of the rows of an MoE layer, a row for each (token, expert) pair.

Each exists twice. `plain_...` uses PyTorch's operators on any device, and is the reference in tests. The
other is one fused pass over the memory, forward and backward: by the compiled library on the CPU, by Triton's
kernels on CUDA. All of them sum in fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from megamoe.kernels.autograd import Function, once_differentiable
from megamoe.kernels.choice import Kernels, RowKernels
from megamoe.kernels.experts.order import ends_of, remember_ends

if TYPE_CHECKING:
    from megamoe.kernels.triton import TritonKernels

MOST_EXPERTS = 512  # of the kernels that sort pairs on CUDA


@dataclass
class RowTokens:
    """The token of each row.

    token_N: int64. row_N: the rows ordered by token. ends_T: where the rows of each token end in row_N. row_N
    and ends_T are for kernels, and None without them. Kernels sum a token's rows in the order of row_N.
    """

    token_N: Tensor
    num_tokens: int
    row_N: Tensor | None = None
    ends_T: Tensor | None = None

    @classmethod
    def of(cls, token_N: Tensor, num_tokens: int, kernels: Kernels) -> "RowTokens":
        """Return the RowTokens of rows in any order."""
        chosen = kernels.rows_on(token_N.device)
        if chosen is None:
            return cls(token_N, num_tokens)
        return cls(token_N, num_tokens, *chosen.rows_by_token(token_N, num_tokens))

    @classmethod
    def of_pairs(cls, token_N: Tensor, order: "Order", num_tokens: int, kernels: Kernels) -> "RowTokens":
        """Return the RowTokens of rows that `order` makes of pairs. token_N: the pairs' tokens, ascending.

        Triton's kernels need no second sort: `order` knows where the rows of neighbouring pairs are. They sum
        a token's rows in the order of its pairs; the compiled library does in that of its experts.
        """
        moved_N = token_N.index_select(0, order.order_N)
        if not kernels.uses_triton(token_N.device):
            return cls.of(moved_N, num_tokens, kernels)
        return cls(moved_N, num_tokens, order.place_N, ends_of(token_N, num_tokens))


@dataclass
class Order:
    """A permutation of rows. order_N: each new row's old index. place_N: each old row's new index."""

    order_N: Tensor
    place_N: Tensor

    @classmethod
    def by_key(cls, key_N: Tensor, size: int, kernels: Kernels) -> "Order":
        """Return the stable order by integer keys in 0 .. size-1.

        The compiled sort raises IndexError for other keys.
        """
        library = kernels.library_on(key_N.device)
        if library is not None:
            return cls(*library.sort_by_key(key_N, size)[:2])
        order_N = torch.argsort(key_N, stable=True)
        place_N = torch.empty_like(order_N)
        place_N[order_N] = torch.arange(order_N.numel(), device=order_N.device)
        return cls(order_N, place_N)

    def back(self) -> "Order":
        """Return the inverse permutation."""
        return Order(self.place_N, self.order_N)


@dataclass
class GroupedPairs:
    """(token, expert) pairs sorted by expert: the token and the weight of each row.

    order_N: int64, the pair of each row. counts_E: int64, the rows of each expert; None where the sort did
    not count them.
    """

    rows: RowTokens
    weight_N: Tensor
    order_N: Tensor
    counts_E: Tensor | None


def group_pairs(
    token_N: Tensor, expert_N: Tensor, weight_N: Tensor, sizes: tuple[int, int], kernels: Kernels
) -> GroupedPairs:
    """Sort pairs by expert, stably.

    token_N, expert_N: int64; the tokens ascend. weight_N: fp32, with gradient. sizes: tokens and experts.
    """
    num_tokens, num_experts = sizes
    weights = kernels.triton_for(weight_N)
    if weights is None or weight_N.dtype != torch.float32 or not 0 < num_experts <= MOST_EXPERTS:
        order = Order.by_key(expert_N, num_experts, kernels)
        rows = RowTokens.of_pairs(token_N, order, num_tokens, kernels)
        return GroupedPairs(rows, permute(weight_N, order), order.order_N, None)
    moved_N, token_N, place_N, order_N, counts_E, ends_E, ends_T = _GroupPairs.apply(
        weight_N, token_N, expert_N, sizes, weights
    )
    remember_ends(counts_E, ends_E)
    return GroupedPairs(RowTokens(token_N, num_tokens, place_N, ends_T), moved_N, order_N, counts_E)


class _GroupPairs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight_N: Tensor,
        token_N: Tensor,
        expert_N: Tensor,
        sizes: tuple[int, int],
        kernels: "TritonKernels",
    ) -> tuple[Tensor, ...]:
        num_tokens, num_experts = sizes
        order_N, place_N, moved_token_N = (torch.empty_like(expert_N) for _ in range(3))
        moved_N = torch.empty_like(weight_N)
        counts_E, ends_E, ends_T = map(expert_N.new_empty, (num_experts, num_experts, num_tokens))
        given = (expert_N.contiguous(), token_N.contiguous(), weight_N, len(token_N), num_experts, num_tokens)
        found = (order_N, place_N, moved_token_N, moved_N, counts_E, ends_E, ends_T)
        kernels.group_pairs(*given, *found)
        ctx.place_N = place_N
        ctx.set_materialize_grads(False)  # not zeros for the results without gradient
        without_gradient = (moved_token_N, place_N, order_N, counts_E, ends_E, ends_T)
        ctx.mark_non_differentiable(*without_gradient)
        return moved_N, *without_gradient

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
        to_weight_N = None if gradient_N is None else gradient_N.index_select(0, ctx.place_N)
        return to_weight_N, None, None, None, None


def permute(values_N: Tensor, order: Order) -> Tensor:
    """Return values_N[order_N], indexed along the first dimension."""
    return _Permute.apply(values_N, order)


class _Permute(Function):
    """A permutation.

    Its gradient is the inverse permutation, and needs no sum as that of general indexing does.
    """

    @staticmethod
    def forward(ctx: Any, values_N: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return values_N.index_select(0, order.order_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor, None]:
        return gradient_N.index_select(0, ctx.order.place_N), None


def gather(hidden_TH: Tensor, rows: RowTokens, kernels: Kernels) -> Tensor:
    """Return the hidden state of each row's token: [T, H] to [N, H]."""
    chosen = kernels.rows_for(hidden_TH)
    if rows.row_N is None or chosen is None:
        return hidden_TH.index_select(0, rows.token_N)
    return _Gather.apply(hidden_TH, rows, chosen)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, rows: RowTokens, kernels: RowKernels) -> Tensor:
        ctx.rows, ctx.kernels = rows, kernels
        return hidden_TH.index_select(0, rows.token_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NH: Tensor) -> tuple[Tensor, None, None]:
        return _sum_rows(gradient_NH.contiguous(), None, ctx.rows, ctx.kernels), None, None


def sum_rows(rows_NH: Tensor, rows: RowTokens, kernels: Kernels) -> Tensor:
    """Return the sum of each token's rows, in fp32 and then in their dtype: [N, H] to [T, H]."""
    chosen = kernels.rows_for(rows_NH)
    if rows.row_N is None or chosen is None:
        summed_TH = rows_NH.new_zeros(rows.num_tokens, rows_NH.shape[1], dtype=torch.float32)
        return summed_TH.index_add(0, rows.token_N, rows_NH.float()).to(rows_NH.dtype)
    return _SumRows.apply(rows_NH, rows, chosen)


class _SumRows(Function):
    @staticmethod
    def forward(ctx: Any, rows_NH: Tensor, rows: RowTokens, kernels: RowKernels) -> Tensor:
        ctx.rows = rows
        return _sum_rows(rows_NH.contiguous(), None, rows, kernels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TH: Tensor) -> tuple[Tensor, None, None]:
        return gradient_TH.index_select(0, ctx.rows.token_N), None, None


def combine(rows_NH: Tensor, weight_N: Tensor, rows: RowTokens, kernels: Kernels) -> Tensor:
    """Return the weighted sum of each token's rows, [T, H] in their dtype; 0 for a token without rows.
    weight_N: fp32.

    Raises:
        ValueError: if the number of rows is not that of the weights and of `rows`.
    """
    if not len(rows_NH) == len(weight_N) == len(rows.token_N):
        sizes = f"{len(rows_NH)} rows, {len(weight_N)} weights, {len(rows.token_N)} tokens of rows"
        raise ValueError(f"expected as many of each, found {sizes}")
    weight_N = weight_N.contiguous()
    chosen = kernels.rows_for(rows_NH)
    if rows.row_N is None or weight_N.dtype != torch.float32 or chosen is None:
        return plain_combine(rows_NH, weight_N, rows)
    return _Combine.apply(rows_NH, weight_N, rows, chosen)


def plain_combine(rows_NH: Tensor, weight_N: Tensor, rows: RowTokens) -> Tensor:
    """Compute `combine` by PyTorch's operators."""
    weighted_NH = rows_NH.float() * weight_N[:, None]
    output_TH = weighted_NH.new_zeros(rows.num_tokens, rows_NH.shape[1])
    return output_TH.index_add(0, rows.token_N, weighted_NH).to(rows_NH.dtype)


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, rows_NH: Tensor, weight_N: Tensor, rows: RowTokens, kernels: RowKernels) -> Tensor:
        ctx.save_for_backward(rows_NH, weight_N)
        ctx.rows, ctx.kernels = rows, kernels
        return _sum_rows(rows_NH, weight_N, rows, kernels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TH: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows_NH, weight_N = ctx.saved_tensors
        rows: RowTokens = ctx.rows
        to_rows_NH, to_weight_N = torch.empty_like(rows_NH), torch.empty_like(weight_N)
        arguments = (
            gradient_TH.contiguous(),
            rows_NH,
            rows.token_N,
            weight_N,
            len(rows_NH),
            rows_NH.shape[1],
        )
        ctx.kernels.combine_backward(*arguments, to_rows_NH, to_weight_N)
        return to_rows_NH, to_weight_N, None, None


def _sum_rows(rows_NH: Tensor, weight_N: Tensor | None, rows: RowTokens, kernels: RowKernels) -> Tensor:
    assert rows.row_N is not None and rows.ends_T is not None
    output_TH = rows_NH.new_empty(rows.num_tokens, rows_NH.shape[1])
    arguments = (rows_NH, rows.row_N, rows.ends_T, weight_N, rows.num_tokens, rows_NH.shape[1], output_TH)
    kernels.combine(*arguments)
    return output_TH


def swiglu(rows_N2F: Tensor, kernels: Kernels) -> Tensor:
    """Return silu(gate) * value of the halves [gate | value]: [N, 2F] to [N, F] (Shazeer 2020, section 2)."""
    chosen = kernels.rows_for(rows_N2F)
    if rows_N2F.dim() != 2 or rows_N2F.shape[1] % 2 or chosen is None:
        return plain_swiglu(rows_N2F)
    return _SwiGLU.apply(rows_N2F, None, chosen)


def weighted_swiglu(rows_N2F: Tensor, weight_N: Tensor, kernels: Kernels) -> Tensor:
    """Return `swiglu` times each row's weight; weight_N: fp32, with a gradient."""
    chosen = kernels.triton_for(rows_N2F)
    if chosen is None or rows_N2F.shape[1] % 2:
        return weighted(lambda rows: swiglu(rows, kernels), rows_N2F, weight_N)
    return _SwiGLU.apply(rows_N2F, weight_N.contiguous(), chosen)


def weighted(activate: Callable[[Tensor], Tensor], rows_NG: Tensor, weight_N: Tensor) -> Tensor:
    """Return activate(rows) times each row's weight, [N, F] in the rows' dtype, multiplied in fp32.

    The backward pass computes the activation again, so that nothing of it is kept.
    """
    return _Weighted.apply(rows_NG, weight_N, activate)


class _Weighted(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight_N: Tensor, activate: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(rows, weight_N)
        ctx.activate = activate
        return (activate(rows).float() * weight_N[:, None]).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight_N = ctx.saved_tensors
        with torch.enable_grad():
            given = rows.detach().requires_grad_()
            active = ctx.activate(given)
        received = gradient.float()
        sent = (received * weight_N[:, None]).to(active.dtype)
        (to_rows,) = torch.autograd.grad(active, given, sent)
        return to_rows, (received * active.detach().float()).sum(1), None


def plain_swiglu(rows_N2F: Tensor) -> Tensor:
    """Compute `swiglu` by PyTorch's operators."""
    gate, value = rows_N2F.chunk(2, dim=-1)
    return functional.silu(gate) * value


class _SwiGLU(Function):
    """weight_N: of each row, on CUDA alone."""

    @staticmethod
    def forward(ctx: Any, rows_N2F: Tensor, weight_N: Tensor | None, kernels: RowKernels) -> Tensor:
        ctx.save_for_backward(rows_N2F, weight_N)
        ctx.kernels = kernels
        count, width = rows_N2F.shape
        rows_NF = rows_N2F.new_empty(count, width // 2)
        weights = () if weight_N is None else (weight_N,)
        kernels.swiglu(rows_N2F, count, width // 2, rows_NF, *weights)
        return rows_NF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NF: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows_N2F, weight_N = ctx.saved_tensors
        to_rows_N2F = torch.empty_like(rows_N2F)
        to_weight_N = None if weight_N is None else torch.empty_like(weight_N)
        weights = () if weight_N is None else (weight_N, to_weight_N)
        arguments = (gradient_NF.contiguous(), rows_N2F, *gradient_NF.shape, to_rows_N2F)
        ctx.kernels.swiglu_backward(*arguments, *weights)
        return to_rows_N2F, to_weight_N, None
