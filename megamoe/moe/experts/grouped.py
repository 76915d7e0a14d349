"""Experts: FFNs of one shape over rows grouped by expert.

Weights are stacked, [experts, out, in] as in nn.Linear. The product is `kernels.products`, or another one
passed as `Products`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from megamoe.config.schema import Activation
from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.kernels.experts.ffn import add_expert_bias, experts_of_rows, is_one_pass, swiglu_experts
from megamoe.kernels.experts.grouped_gemm import DelayedWeightGradients, grouped_product, takes_any_count
from megamoe.moe import rng
from megamoe.moe.experts.activations import activate, is_gated, up_width
from megamoe.moe.experts.dropout import ExpertDropout
from megamoe.moe.recompute import discard_output

# For PyTorch's bf16 product on the CPU: oneDNN prepares a kernel for every new row count, and the counts
# change in every step. Groups padded to a multiple of this have only a few row counts.
PADDED_ROWS = 64

# (rows [N, in] grouped by expert, weight [experts, out, in], counts [experts] int64) -> [N, out]: each row
# times the transposed weight of its expert. An expert, or all of them, may have no row. Our own product also
# takes `delayed`.
GroupedProduct = Callable[..., Tensor]


@dataclass(frozen=True)
class Products:
    """How the products of grouped experts are computed.

    make: from (experts, in, out) to the product of one stacked weight, a function, or a module that holds no
    parameters; None: `grouped_product`. row_multiple: each expert's rows are filled up with zeros to a
    multiple of it. host_counts: the products read the counts on the CPU, so that both of an FFN share one
    copy.
    """

    make: Callable[[int, int, int], GroupedProduct] | None = None
    row_multiple: int = 1
    host_counts: bool = False


OWN_PRODUCTS = Products()


@dataclass(frozen=True)
class Slice:
    """Slice number `index` of `count` equal slices of a dimension."""

    index: int = 0
    count: int = 1

    def of(self, size: int) -> slice:
        """Return the slice of a dimension of this size."""
        return slice(self.index * size // self.count, (self.index + 1) * size // self.count)


class GroupedExperts(nn.Module):
    """E_local experts of hidden size H and FFN size F.

    cut: this rank's slice of F; `forward` then returns a partial result, to be summed over all slices. bias:
    both linear layers have biases, which start at 0; of the second one's each slice holds and adds its part.

    An expert's start depends on (seed, layer, its global number, sublayer) alone, so that every
    expert-parallel layout starts from the same model. std: of the first weight; output_std: of the second;
    init_scale: see `rng.init_weight`. sublayer: which FFN of its expert this is, from 1. products: how the
    two products are worked out. kernels: the model's choice. recomputed: with `experts_activation`, the
    activation's output is not kept for the backward pass.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        expert_ids: range,
        *,
        activation: Activation,
        std: float,
        output_std: float,
        seed: int,
        layer: int,
        init_scale: float | None = None,
        bias: bool = False,
        sublayer: int = 1,
        cut: Slice = Slice(),
        products: Products = OWN_PRODUCTS,
        kernels: Kernels = DEFAULT_KERNELS,
        recomputed: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.discards = "experts_activation" in recomputed
        for size, what in ((ffn_size, "expert FFN size"), (hidden_size if bias else 0, "hidden size")):
            if size % cut.count:
                raise ValueError(f"{what} {size} does not divide over {cut.count} slices")
        self.activation = activation
        self.sublayer = sublayer
        self.cut = cut
        self.products = products
        here = ffn_size // cut.count
        width = up_width(here, activation)
        self.up = nn.Parameter(torch.empty(len(expert_ids), width, hidden_size))
        self.down = nn.Parameter(torch.empty(len(expert_ids), hidden_size, here))
        self.up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        if bias:
            columns = cut.of(hidden_size)
            self.up_bias = nn.Parameter(torch.zeros(len(expert_ids), width))
            self.down_bias = nn.Parameter(torch.zeros(len(expert_ids), columns.stop - columns.start))
        self.weight_gradients = WeightGradients()
        own = functools.partial(grouped_product, kernels=kernels)
        make = products.make or (lambda *sizes: own)
        self.up_product = make(len(expert_ids), hidden_size, width)
        self.down_product = make(len(expert_ids), here, hidden_size)
        whole_up = torch.empty(up_width(ffn_size, activation), hidden_size)
        whole_down = torch.empty(hidden_size, ffn_size)
        for local, expert in enumerate(expert_ids):
            whose = f"expert {expert}" if sublayer == 1 else f"expert {expert}, sub-layer {sublayer}"
            for weight, weight_std, purpose in (
                (whole_up, std, whose),
                (whole_down, output_std, f"{whose}, down"),
            ):
                rng.init_weight(weight, rng.key(seed, 0, layer, purpose), weight_std, init_scale)
            self.up.data[local] = cut_up(whole_up, ffn_size, cut)
            self.down.data[local] = whole_down[:, cut.of(ffn_size)]

    def put_off_gradients(self) -> DelayedWeightGradients | None:
        """Return what computes the weights' gradients at the place of this call in the backward pass, which
        is later than the place of `forward`: what is begun in between runs beside them.

        None where there is nothing to put off, with other products than our own, and for weights that are not
        here now (ZeRO 3).
        """
        weights = self.up, self.down
        wanted = torch.is_grad_enabled() and all(weight.requires_grad for weight in weights)
        if not wanted or self.products.make is not None or any(weight.dim() != 3 for weight in weights):
            return None
        delayed: DelayedWeightGradients = self.weight_gradients(*weights)
        # ZeRO 3's hooks hand over other tensors, also for a small weight that stays whole.
        return delayed if delayed.weights == [id(weight) for weight in weights] else None

    def forward(
        self,
        rows_NH: Tensor,
        counts_E: Tensor,
        dropout: ExpertDropout | None = None,
        delayed: DelayedWeightGradients | None = None,
        weight_N: Tensor | None = None,
        only_gate: bool = False,
        host_E: Tensor | None = None,
    ) -> Tensor:
        """[N, H] rows grouped by expert and their counts, int64 [E_local] -> [N, H].

        delayed: of `put_off_gradients`; not used where one pass of kernels computes all gradients. weight_N:
        fp32, of each row; it multiplies the activation, and thereby the output of experts without biases.
        host_E: the counts on the host, for products that read them there; None: they are read here.
        only_gate: return the first product alone, of the gate if there is one, without bias and activation,
        [N, F].
        """
        multiple = self.products.row_multiple
        padded_alike = rows_NH.device.type == "cpu" and rows_NH.dtype == torch.bfloat16
        if padded_alike and not takes_any_count(rows_NH, (self.up, self.down), self.kernels):
            multiple = math.lcm(multiple, PADDED_ROWS)
        if not self.products.host_counts:
            host_E = counts_E
        elif host_E is None:
            host_E = counts_E.cpu()
        if multiple == 1:
            if only_gate:
                return self._gate(rows_NH, host_E)
            return self._ffn(rows_NH, counts_E, host_E, dropout, delayed, weight_N)
        place_N, padded_E = padded_places(counts_E, multiple, len(rows_NH))
        host_E = padded_counts(host_E, multiple)
        num_rows = int(host_E.sum())
        padded = rows_NH.new_zeros(num_rows, rows_NH.shape[1]).index_copy(0, place_N, rows_NH)
        if only_gate:
            return self._gate(padded, host_E).index_select(0, place_N)
        spread = None if dropout is None else dropout.spread(place_N, num_rows)
        if weight_N is not None:
            weight_N = weight_N.new_zeros(num_rows).index_copy(0, place_N, weight_N)
        return self._ffn(padded, padded_E, host_E, spread, delayed, weight_N).index_select(0, place_N)

    def _gate(self, rows_NH: Tensor, counts_E: Tensor) -> Tensor:
        rows_NG = self.up_product(rows_NH, self.up, counts_E)
        return rows_NG.chunk(2, dim=-1)[0] if is_gated(self.activation) else rows_NG

    def _ffn(
        self,
        rows_NH: Tensor,
        counts_E: Tensor,
        product_counts_E: Tensor,
        dropout: ExpertDropout | None,
        delayed: DelayedWeightGradients | None,
        weight_N: Tensor | None,
    ) -> Tensor:
        """product_counts_E: the counts where the products read them."""
        expert_N = None if self.up_bias is None else experts_of_rows(counts_E, len(rows_NH))
        # The fused form knows SwiGLU without biases alone; all others take the three steps below.
        own_form = self.activation == "swiglu" and dropout is None and expert_N is None
        own_form &= self.products.make is None
        operands = rows_NH, self.up, self.down
        if own_form and (not self.discards or is_one_pass(*operands, self.kernels, weight_N is not None)):
            return swiglu_experts(*operands, counts_E, self.kernels, delayed, weight_N)
        options = {} if delayed is None else {"delayed": delayed}
        rows_NG = self.up_product(rows_NH, self.up, product_counts_E, **options)
        if self.up_bias is not None and expert_N is not None:
            rows_NG = add_expert_bias(rows_NG, self.up_bias, expert_N)

        def activated(rows: Tensor) -> Tensor:
            rows_NF = activate(rows, self.activation, self.kernels, weight_N)
            if dropout is None:
                return rows_NF
            return dropout.on_activation(rows_NF, self.sublayer, self.cut.index * rows_NF.shape[1])

        rows_NF = discard_output(activated, rows_NG) if self.discards else activated(rows_NG)
        output_NH = self.down_product(rows_NF, self.down, product_counts_E, **options)
        if self.down_bias is None or expert_N is None:
            return output_NH
        own, hidden_size = self.cut.of(output_NH.shape[1]), output_NH.shape[1]
        bias_EH = functional.pad(self.down_bias, (own.start, hidden_size - own.stop))
        return add_expert_bias(output_NH, bias_EH, expert_N)


class WeightGradients(nn.Module):
    """A module of its own, so that a plan can tell these products from the experts' others."""

    def forward(self, *weights: Tensor) -> DelayedWeightGradients:
        """See `DelayedWeightGradients.of`."""
        return DelayedWeightGradients.of(*weights)


def cut_up(weight: Tensor, ffn_size: int, cut: Slice) -> Tensor:
    """Return a slice of each half of a first weight, [F or 2F, H]."""
    return weight.view(-1, ffn_size, weight.shape[-1])[:, cut.of(ffn_size)].reshape(-1, weight.shape[-1])


def padded_counts(counts_E: Tensor, unit: int) -> Tensor:
    """Return the counts filled up to multiples of `unit`, int64 [E]."""
    return (counts_E + unit - 1) // unit * unit


def padded_places(counts_E: Tensor, unit: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the positions of rows grouped by expert if each group is padded to a multiple of `unit`.

    counts_E: int64, with the sum `num_rows` -> (each row's place, int64 [N]; the padded counts, int64 [E]).
    """
    padded_E = padded_counts(counts_E, unit)
    shift_E = (padded_E.cumsum(0) - padded_E) - (counts_E.cumsum(0) - counts_E)
    shift_N = shift_E.repeat_interleave(counts_E, output_size=num_rows)
    return torch.arange(num_rows, device=counts_E.device) + shift_N, padded_E
