"""The activations of dense FFNs and experts: elementwise ones, and gated ones (Shazeer 2020, section 2).

A gated activation takes [gate | value] halves and returns f(gate) * value; its first weight has twice the
rows.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from megamoe.config.schema import Activation
from megamoe.kernels.choice import Kernels
from megamoe.kernels.experts.ffn import clamped_swiglu, plain_clamped_swiglu, steep_silu
from megamoe.kernels.experts.rows import swiglu, weighted, weighted_swiglu

CLAMPED = "swiglu_clamped"  # see `kernels.clamped_swiglu`
Pointwise = Callable[[Tensor], Tensor]
GATED: dict[str, Pointwise] = {
    "swiglu": functional.silu,
    "geglu": functional.gelu,
    "reglu": functional.relu,
    CLAMPED: steep_silu,  # its halves are clamped before, and the value has an offset
}
UNGATED: dict[str, Pointwise] = {"gelu": functional.gelu, "relu": functional.relu}


def is_gated(activation: Activation) -> bool:
    """Whether the activation multiplies a value by an activated gate."""
    return activation in GATED


def pointwise(activation: Activation) -> Pointwise:
    """Return the elementwise function, which a gated activation applies to its gate. GELU is exact."""
    return (GATED | UNGATED)[activation]


def activate(
    rows: Tensor, activation: Activation, kernels: Kernels, weight_N: Tensor | None = None
) -> Tensor:
    """[..., F], or [..., 2F] of [gate | value] halves -> [..., F]; weight_N: of each row, fp32."""
    if weight_N is not None:
        if activation == "swiglu":
            return weighted_swiglu(rows, weight_N, kernels)
        return weighted(lambda given: activate(given, activation, kernels), rows, weight_N)
    if activation == CLAMPED:
        return clamped_swiglu(rows)
    return swiglu(rows, kernels) if activation == "swiglu" else activate_plainly(rows, activation)


def activate_plainly(rows: Tensor, activation: Activation) -> Tensor:
    """`activate` in PyTorch's operators alone."""
    if activation == CLAMPED:
        return plain_clamped_swiglu(rows)
    function = pointwise(activation)
    if not is_gated(activation):
        return function(rows)
    gate, value = rows.chunk(2, dim=-1)
    return function(gate) * value


def num_halves(activation: Activation) -> int:
    """Return the first weight's rows as a multiple of the FFN size: 2 with a gate, 1 without."""
    return 2 if is_gated(activation) else 1


def up_width(ffn_size: int, activation: Activation) -> int:
    """Return the number of rows of the first weight."""
    return num_halves(activation) * ffn_size
