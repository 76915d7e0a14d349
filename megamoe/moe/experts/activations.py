"""The activations of dense FFNs and experts: pointwise ones, and gated ones (Shazeer 2020, section 2).

A gated activation takes [gate | value] halves and gives f(gate) * value; its first weight has twice the rows.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from megamoe.config.schema import Activation
from megamoe.kernels.choice import Kernels
from megamoe.kernels.rows import swiglu

Pointwise = Callable[[Tensor], Tensor]
GATED: dict[str, Pointwise] = {
    "swiglu": functional.silu,
    "geglu": functional.gelu,
    "reglu": functional.relu,
}
UNGATED: dict[str, Pointwise] = {"gelu": functional.gelu, "relu": functional.relu}


def is_gated(activation: Activation) -> bool:
    """Whether it multiplies a value by an activated gate."""
    return activation in GATED


def pointwise(activation: Activation) -> Pointwise:
    """What is applied to each number; of a gated one, to the gate's. GELU is exact, by the error function."""
    return (GATED | UNGATED)[activation]


def activate(rows: Tensor, activation: Activation, kernels: Kernels) -> Tensor:
    """[..., F], or [..., 2F] of [gate | value] halves -> [..., F]."""
    return swiglu(rows, kernels) if activation == "swiglu" else activate_plainly(rows, activation)


def activate_plainly(rows: Tensor, activation: Activation) -> Tensor:
    """`activate` by PyTorch's operators alone."""
    function = pointwise(activation)
    if not is_gated(activation):
        return function(rows)
    gate, value = rows.chunk(2, dim=-1)
    return function(gate) * value


def num_halves(activation: Activation) -> int:
    """How many times the FFN size the first weight's rows are: 2 with a gate, 1 without."""
    return 2 if is_gated(activation) else 1


def up_width(ffn_size: int, activation: Activation) -> int:
    """Rows of the first weight."""
    return num_halves(activation) * ffn_size
