"""Which weights Muon updates, and the matrices in them that are orthogonalised on their own.

qkv of self attention   queries, keys and values, each of all heads
kv of cross attention   keys and values, each of all heads
gated first weights     gate and value, of dense FFNs, experts and shared experts
stacked experts         the matrices of each expert
all others              the weight as it is

Newton-Schulz steps turn a matrix U S V^T into about U V^T by products alone: a step maps every singular value
x to a x + b x^3 + c x^5. Sources: Jordan et al. 2024 (Muon), Amsel et al. 2025 (Polar Express, arXiv
2505.16932).
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.moe.utils import is_moe_param
from torch import Tensor, nn

from megamoe.compat.deepspeed_zero import whole_shape
from megamoe.config.schema import MuonConfig

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


Row = tuple[float, float, float]  # a, b, c of a step
SMALLEST_NORM = 1e-7  # of a matrix; a smaller one, such as zero, is divided by this
# Of Polar Express, algorithm 1, for singular values from 1e-3 to 1. All rows but the last are made for
# values up to SAFETY, so that rounding takes none out of the range in which the next step shrinks it.
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
SAFETY = 1.01
TABLES: dict[str, tuple[Row, ...]] = {
    "jordan": ((3.4445, -4.7750, 2.0315),),
    "polar_express": (
        *((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in POLAR_EXPRESS[:-1]),
        POLAR_EXPRESS[-1],
    ),
}


def step_rows(config: MuonConfig) -> list[Row]:
    """Return the coefficients of each step."""
    named = config.coefficients
    table = TABLES[named] if isinstance(named, str) else [(a, b, c) for a, b, c in named]
    return [table[min(step, len(table) - 1)] for step in range(config.steps)]


def orthogonalise(matrices_BMN: Tensor, rows: list[Row]) -> Tensor:
    """Return the matrices after a step for each row of coefficients, each matrix on its own, in their dtype.

    M may not be more than N: the products are then the smaller ones.
    """
    norm_B11 = matrices_BMN.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    x_BMN = matrices_BMN / norm_B11  # no singular value is above 1
    for a, b, c in rows:
        gram_BMM = x_BMN @ x_BMN.mT
        factor_BMM = torch.baddbmm(gram_BMM, gram_BMM, gram_BMM, beta=b, alpha=c)
        x_BMN = torch.baddbmm(x_BMN, factor_BMM, x_BMN, beta=a)
    return x_BMN


def flops(rows: int, columns: int, steps: int) -> float:
    """Return the FLOPs of a matrix's steps."""
    small, large = sorted((rows, columns))
    return steps * 2 * small * small * (2 * large + small)
