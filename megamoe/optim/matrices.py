"""Which weights Muon updates, and the matrices in them that are orthogonalised on their own.

qkv of self attention   queries, keys and values, each of all heads
kv of cross attention   keys and values, each of all heads
gated first weights     gate and value, of dense FFNs, experts and shared experts
stacked experts         the matrices of each expert
all others              the weight as it is
"""

import re
from dataclasses import dataclass
from typing import Any

from deepspeed.moe.utils import is_moe_param
from torch import Tensor, nn

from megamoe.compat.deepspeed_zero import whole_shape

# Embeddings, output layers and heads; routers, the parts of losses, the mix of shared experts, and mix and
# vectors of constant experts.
LEFT_TO_ADAMW = re.compile(r"(^|\.)(embedding|output_layer|head|router|losses|mix|zero)(\.|$)")
VECTORS = re.compile(r"\.zero\.vector$")  # of constant experts, a row for each


@dataclass(frozen=True)
class Matrix:
    """A matrix of a weight (of each expert, in a stack of them): these rows of the whole, and all columns."""

    ranges: tuple[range, ...]
    columns: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(map(len, self.ranges))

    @property
    def sizes(self) -> tuple[int, int]:
        """The smaller of the two sizes, and the larger."""
        return min(self.rows, self.columns), max(self.rows, self.columns)


def is_matrix(parameter: Tensor) -> bool:
    """Return whether a parameter has rows and columns, or the weights of its experts have."""
    return len(whole_shape(parameter)) - (1 if is_moe_param(parameter) else 0) == 2


def takes_muon(name: str, parameter: Tensor) -> bool:
    """Return whether Muon updates a parameter for which `optimizer.groups` says nothing else."""
    return is_matrix(parameter) and LEFT_TO_ADAMW.search(name) is None


def fused_weights(model: nn.Module) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return (repeats, shares) of the weights that hold several matrices, by name; see `matrices_of`."""
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    for name, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        if hasattr(module, "linear_qkv"):
            groups = config.num_query_groups or config.num_attention_heads
            found[f"{name}.linear_qkv.weight"] = groups, (config.num_attention_heads // groups, 1, 1)
        if hasattr(module, "linear_kv"):
            found[f"{name}.linear_kv.weight"] = config.num_attention_heads, (1, 1)
        if hasattr(module, "linear_fc1") and config.gated_linear_unit:
            found[f"{name}.linear_fc1.weight"] = 1, (1, 1)
        if hasattr(module, "up") and hasattr(module, "down"):
            halves = whole_shape(module.up)[-2] // whole_shape(module.down)[-1]
            found[f"{name}.up"] = 1, (1,) * halves
    return found


def matrices_of(rows: int, columns: int, repeats: int = 1, shares: tuple[int, ...] = (1,)) -> list[Matrix]:
    """Return the matrices of a whole weight, whose rows repeat the same parts, of these shares.

    Megatron-Core's qkv repeats for each group (the queries of its heads, its key, its value).
    """
    unit = rows // repeats
    share = unit // sum(shares)
    found, start = [], 0
    for each in shares:
        stop = start + each * share
        found.append(Matrix(tuple(range(at + start, at + stop) for at in range(0, rows, unit)), columns))
        start = stop
    return found
