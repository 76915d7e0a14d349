"""The grouped matrix product (grouped GEMM): rows grouped by expert, each times its expert's weight.

PyTorch's grouped GEMM computes it on every device. On the CPU the compiled library replaces it, with any
number of rows per expert: in fp32 by PyTorch's own BLAS, where each thread takes an equal share of the rows,
and in bf16 by AMX if the processor has it. On CUDA Triton's kernels replace it where PyTorch would loop over
the experts on the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megamoe.compat.torch_compat import has_bf16_products
from megamoe.kernels.autograd import Function, once_differentiable
from megamoe.kernels.choice import Kernels, RowKernels
from megamoe.kernels.experts.order import ends_of_counts

ALIGNMENT = 16  # bytes
TILE = 32  # the compiled product in bf16 takes sizes that are multiples of it


@dataclass
class DelayedWeightGradients:
    """Puts the gradients of weights off to a node of the graph that was made before their products.

    Autograd runs the nodes that are ready in the reverse order of their creation. So a gradient exchange
    that was started between the two runs beside these products, whose results it does not need. Until then
    the graph holds the products' inputs and the gradients of their outputs.

    token: without elements; it stands for the weights in the graph of the products. pending: what computes
    the gradient of the weight with this number.
    """

    token: Tensor = field(init=False, repr=False)
    pending: dict[int, Callable[[], Tensor]] = field(default_factory=dict, init=False, repr=False)
    weights: list[int] = field(default_factory=list, init=False, repr=False)

    @classmethod
    def of(cls, *weights: Tensor) -> "DelayedWeightGradients":
        """Return the node of these weights, made now."""
        delayed = cls()
        delayed.weights = [id(weight) for weight in weights]
        delayed.token = _Delayed.apply(delayed, *weights)
        return delayed


class _Delayed(Function):
    @staticmethod
    def forward(ctx: Any, delayed: DelayedWeightGradients, *weights: Tensor) -> Tensor:
        ctx.delayed = delayed
        return weights[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, nothing: Tensor) -> tuple[Tensor | None, ...]:
        delayed: DelayedWeightGradients = ctx.delayed
        pending, delayed.pending = delayed.pending, {}
        places = range(len(delayed.weights))
        return None, *(pending[place]() if place in pending else None for place in places)


def grouped_product(
    rows_NI: Tensor,
    weight_EOI: Tensor,
    counts_E: Tensor,
    kernels: Kernels,
    delayed: DelayedWeightGradients | None = None,
) -> Tensor:
    """Multiply each row by the transposed weight of its expert; return [N, O] in the rows' dtype.

    counts_E: int64, the number of rows of each expert, N in total. Any of them may be 0. delayed: computes
    the weight's gradient, if it is one of its weights.

    Raises:
        ValueError: if the weight has another width or dtype than the rows; on the CPU, if the counts do not
            add up to the rows.
    """
    ends_E = checked_ends(rows_NI, weight_EOI, counts_E)
    rows_NI = rows_NI.contiguous()
    operands: list[Any] = [rows_NI, weight_EOI, ends_E, kernels]
    if delayed is not None:
        operands[1] = weight_EOI.detach()
        operands += [delayed, delayed.weights.index(id(weight_EOI)), delayed.token]
    return _GroupedProduct.apply(*operands)


def checked_ends(rows_NI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Return where each expert's rows end, int64 [E]; ValueError as in `grouped_product`."""
    if weight_EOI.shape[2] != rows_NI.shape[1] or weight_EOI.dtype != rows_NI.dtype:
        found = f"{list(rows_NI.shape)} {rows_NI.dtype} and {list(weight_EOI.shape)} {weight_EOI.dtype}"
        raise ValueError(f"rows and weight do not fit: found {found}")
    ends_E = ends_of_counts(counts_E)
    on_cpu = ends_E.device.type == "cpu"  # on a GPU the check would wait for the device
    if on_cpu and (len(ends_E) != len(weight_EOI) or int(ends_E[-1]) != len(rows_NI)):
        experts = f"{len(rows_NI)} rows of {len(weight_EOI)} experts"
        raise ValueError(f"found counts {counts_E.tolist()}, expected those of {experts}")
    return ends_E


def takes_any_count(rows_NI: Tensor, weights_EOI: Sequence[Tensor], kernels: Kernels) -> bool:
    """Return whether the product's cost does not depend on how the rows are distributed over the experts."""
    return all(product_library(rows_NI, weight.shape, kernels) is not None for weight in weights_EOI)


class _GroupedProduct(Function):
    """The grouped product with its gradients. It saves the weight, not a transposed view of it.

    ZeRO 3 frees a weight's memory after the forward pass and fills it again before the backward pass. A view
    would keep the gathered memory alive. delayed: computes the gradient of a detached weight, its weight with
    the number `place`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows_NI: Tensor,
        weight_EOI: Tensor,
        ends_E: Tensor,
        kernels: Kernels,
        delayed: DelayedWeightGradients | None = None,
        place: int = 0,
        token: Tensor | None = None,
    ) -> Tensor:
        ctx.kernels, ctx.delayed, ctx.place = kernels, delayed, place
        ctx.save_for_backward(rows_NI, weight_EOI, ends_E)
        return _product(rows_NI, weight_EOI, ends_E, kernels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NO: Tensor) -> tuple[Tensor | None, ...]:
        rows_NI, weight_EOI, ends_E = ctx.saved_tensors
        gradient_NO, kernels = gradient_NO.contiguous(), ctx.kernels
        to_rows, to_weight, *_ = ctx.needs_input_grad
        weight = partial(_to_weight, gradient_NO, rows_NI, weight_EOI, ends_E, kernels)
        rows = _to_rows(gradient_NO, weight_EOI, ends_E, kernels) if to_rows else None
        if ctx.delayed is None:
            return rows, weight() if to_weight else None, None, None
        ctx.delayed.pending[ctx.place] = weight
        return rows, None, None, None, None, None, gradient_NO.new_empty(0)


def _product(rows_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor, kernels: Kernels) -> Tensor:
    library = product_library(rows_NI, weight_EOI.shape, kernels)
    if library is None:
        return _grouped_mm(rows_NI, _aligned(weight_EOI).transpose(1, 2), ends_E)
    output_NO = rows_NI.new_empty(len(rows_NI), weight_EOI.shape[1])
    library.forward(rows_NI, weight_EOI.contiguous(), ends_E, *_sizes(weight_EOI), output_NO)
    return output_NO


def _grouped_mm(left: Tensor, right: Tensor, ends_E: Tensor) -> Tensor:
    if left.dtype == torch.bfloat16 and left.device.type == "cpu" and not has_bf16_products():
        return _widened(left, right, ends_E)
    return functional.grouped_mm(left, right, offs=ends_E.to(torch.int32))


def _widened(left: Tensor, right: Tensor, ends_E: Tensor) -> Tensor:
    """Compute `grouped_mm` in bf16 by products in fp32, expert by expert, each rounded once.

    At a time one expert's operands exist in fp32.
    """
    begins = [0, *ends_E.tolist()]
    groups = [slice(begin, end) for begin, end in pairwise(begins)]
    if left.dim() == right.dim() == 2:  # columns of `left` and rows of `right` are grouped: weight gradients
        return torch.stack([(left[:, group].float() @ right[group].float()).bfloat16() for group in groups])
    output = left.new_empty(len(left), right.shape[2])
    for group, weight in zip(groups, right, strict=True):
        output[group] = left[group].float() @ weight.float()
    return output


def _aligned(weight_EOI: Tensor) -> Tensor:
    """Return the weight, or a copy that begins at a multiple of ALIGNMENT, which `grouped_mm` asks for.

    ZeRO 3 gathers several parameters into one tensor, where a weight may begin anywhere.
    """
    begin = weight_EOI.storage_offset() * weight_EOI.element_size()
    return weight_EOI.clone() if begin % ALIGNMENT else weight_EOI


def _to_rows(gradient_NO: Tensor, weight_EOI: Tensor, ends_E: Tensor, kernels: Kernels) -> Tensor:
    library = product_library(gradient_NO, weight_EOI.shape, kernels)
    if library is None:
        return _grouped_mm(gradient_NO, _aligned(weight_EOI), ends_E)
    output_NI = gradient_NO.new_empty(len(gradient_NO), weight_EOI.shape[2])
    library.to_rows(gradient_NO, weight_EOI.contiguous(), ends_E, *_sizes(weight_EOI), output_NI)
    return output_NI


def _to_weight(
    gradient_NO: Tensor, rows_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor, kernels: Kernels
) -> Tensor:
    library = product_library(rows_NI, weight_EOI.shape, kernels)
    if library is None:
        return _grouped_mm(gradient_NO.T, rows_NI, ends_E)
    output_EOI = rows_NI.new_empty(weight_EOI.shape)
    library.to_weight(gradient_NO, rows_NI, ends_E, *_sizes(weight_EOI), output_EOI)
    return output_EOI


def _sizes(weight_EOI: Tensor) -> tuple[int, int, int]:
    """Return the experts, and the sizes of the input and the output."""
    num_experts, out_size, in_size = weight_EOI.shape
    return num_experts, in_size, out_size


def product_library(rows: Tensor, shape: torch.Size, kernels: Kernels) -> RowKernels | None:
    """Return the library, or Triton's kernels, for the product of such rows with weights of that shape.

    Return None for PyTorch's.
    """
    if kernels.use_triton_grouped_gemm(rows, shape[0]):
        return kernels.rows_for(rows)
    library = kernels.library_for(rows)
    if library is None:
        return None
    if rows.dtype == torch.bfloat16:
        fits = library.has_tiles and shape[1] % TILE == shape[2] % TILE == 0
    else:
        fits = library.sgemm is not None
    return library if fits else None
