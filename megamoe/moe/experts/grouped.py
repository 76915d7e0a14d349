"""Experts: many FFNs of one shape over rows grouped by expert.

Weights are stacked, [experts, out, in] as in nn.Linear; the product is `kernels.products`, or another that is
handed in as `Products`. `loop_experts` computes the same by a plain loop; the tests hold the two
against each other.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megamoe.config.schema import Activation
from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.kernels.experts import swiglu_experts
from megamoe.kernels.products import grouped_product, takes_any_count
from megamoe.moe import rng
from megamoe.moe.experts.activations import activate, activate_plainly, up_width
from megamoe.moe.experts.dropout import ExpertDropout

# Of PyTorch's product in bf16 on the CPU: oneDNN prepares its kernel anew for every row count, and the counts
# change at every step; groups padded to a multiple of this meet only a few.
PADDED_ROWS = 64

# (rows [N, in] grouped by expert, weight [experts, out, in], counts [experts] int64) -> [N, out]: each row
# times the transposed weight of its expert. An expert, or all of them, may have no row.
GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Products:
    """How the products of grouped experts are worked out.

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
    """Number `index` of `count` equal slices of a size."""

    index: int = 0
    count: int = 1

    def of(self, size: int) -> slice:
        """Its place in a dimension of that size."""
        return slice(self.index * size // self.count, (self.index + 1) * size // self.count)


class GroupedExperts(nn.Module):
    """E_local experts of hidden size H and FFN size F, without biases.

    cut: the slice of F that is here; what `forward` gives is then its part of a sum over all slices.

    An expert's start depends on (seed, layer, its global number, sublayer) alone, so that every
    expert-parallel layout starts from the same model. std: of the first weight; output_std: of the second;
    init_scale: see `rng.start_weight`. sublayer: which FFN of its expert this is, from 1. products: how the
    two products are worked out. kernels: the model's choice.
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
        sublayer: int = 1,
        cut: Slice = Slice(),
        products: Products = OWN_PRODUCTS,
        kernels: Kernels = DEFAULT_KERNELS,
    ) -> None:
        super().__init__()
        self.kernels = kernels
        if ffn_size % cut.count:
            raise ValueError(f"expert FFN size {ffn_size} does not divide over {cut.count} slices")
        self.activation = activation
        self.sublayer = sublayer
        self.cut = cut
        self.products = products
        here = ffn_size // cut.count
        width = up_width(here, activation)
        self.up = nn.Parameter(torch.empty(len(expert_ids), width, hidden_size))
        self.down = nn.Parameter(torch.empty(len(expert_ids), hidden_size, here))
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
                rng.start_weight(weight, rng.key(seed, 0, layer, purpose), weight_std, init_scale)
            self.up.data[local] = cut_up(whole_up, ffn_size, cut)
            self.down.data[local] = whole_down[:, cut.of(ffn_size)]

    def forward(self, rows_NH: Tensor, counts_E: Tensor, dropout: ExpertDropout | None = None) -> Tensor:
        """rows_NH grouped by expert, counts_E int64 their numbers -> [N, H]."""
        multiple = self.products.row_multiple
        padded_alike = rows_NH.device.type == "cpu" and rows_NH.dtype == torch.bfloat16
        if padded_alike and not takes_any_count(rows_NH, (self.up, self.down), self.kernels):
            multiple = math.lcm(multiple, PADDED_ROWS)
        if multiple == 1:
            return self._ffn(rows_NH, counts_E, dropout)
        place_N, padded_E = padded_places(counts_E, multiple)
        num_rows = int(padded_E.sum())
        padded = rows_NH.new_zeros(num_rows, rows_NH.shape[1]).index_copy(0, place_N, rows_NH)
        spread = None if dropout is None else dropout.spread(place_N, num_rows)
        return self._ffn(padded, padded_E, spread).index_select(0, place_N)

    def _ffn(self, rows_NH: Tensor, counts_E: Tensor, dropout: ExpertDropout | None) -> Tensor:
        if self.products.host_counts:
            counts_E = counts_E.cpu()
        # The fused form knows SwiGLU alone; every other activation takes the three steps below.
        if self.activation == "swiglu" and dropout is None and self.products.make is None:
            return swiglu_experts(rows_NH, self.up, self.down, counts_E, self.kernels)
        rows_NF = activate(self.up_product(rows_NH, self.up, counts_E), self.activation, self.kernels)
        if dropout is not None:
            rows_NF = dropout.on_activation(rows_NF, self.sublayer, self.cut.index * rows_NF.shape[1])
        return self.down_product(rows_NF, self.down, counts_E)


def cut_up(weight: Tensor, ffn_size: int, cut: Slice) -> Tensor:
    """A first weight, [F or 2F, H] -> that slice of each of its halves."""
    return weight.view(-1, ffn_size, weight.shape[-1])[:, cut.of(ffn_size)].reshape(-1, weight.shape[-1])


def padded_places(counts_E: Tensor, unit: int) -> tuple[Tensor, Tensor]:
    """Where rows grouped by expert stand when each group is padded to a multiple of `unit`.

    counts_E: int64 -> (each row's place, int64 [N]; the padded counts, int64 [E]).
    """
    padded_E = (counts_E + unit - 1) // unit * unit
    shift_E = (padded_E.cumsum(0) - padded_E) - (counts_E.cumsum(0) - counts_E)
    shift_N = shift_E.repeat_interleave(counts_E)
    return torch.arange(shift_N.numel(), device=counts_E.device) + shift_N, padded_E


def loop_experts(experts: GroupedExperts, rows_NH: Tensor, counts_E: Tensor) -> Tensor:
    """The oracle of `GroupedExperts.forward`: one expert after the other, by PyTorch's operators."""
    outputs = []
    for rows, up, down in zip(rows_NH.split(counts_E.tolist()), experts.up, experts.down, strict=True):
        outputs.append(activate_plainly(rows @ up.T, experts.activation) @ down.T)
    return torch.cat(outputs)
