"""Newton-Schulz steps, which turn a matrix U S V^T into about U V^T by products alone.

A step maps every singular value x to a x + b x^3 + c x^5. Sources: Jordan et al. 2024 (Muon), Amsel et al.
2025 (Polar Express, arXiv 2505.16932).
"""

import torch
from torch import Tensor

from megamoe.config.schema import MuonConfig

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
