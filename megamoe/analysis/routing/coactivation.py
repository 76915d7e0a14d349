"""Co-activation: which experts are chosen together."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def coactivation(chosen_SE: NDArray[np.bool_]) -> dict[str, Any]:
    """Count the pairs of experts that the same token chose.

    Returns:
        together_EE: int counts; the diagonal is the number of tokens of each expert. share_EE: the share of
        expert i's tokens that also chose j, together_ij / together_ii; 0 for an unused expert. lift_EE:
        together_ij S / (together_ii together_jj), 1 where i and j are independent; None where one is unused.
        max_lift: the largest lift of two different experts that are used, None if there are not two.

    Source: ours; lift is a usual measure of association rules.
    """
    chosen = chosen_SE.astype(np.int64)
    together_EE = chosen.T @ chosen
    used_E = together_EE.diagonal()
    share_EE = together_EE / np.maximum(used_E, 1)[:, None]
    lift_EE = together_EE * len(chosen) / np.maximum(np.outer(used_E, used_E), 1)
    known_EE = np.outer(used_E > 0, used_E > 0)
    others = known_EE & ~np.eye(len(used_E), dtype=bool)
    return {
        "together_EE": together_EE.tolist(),
        "share_EE": share_EE.tolist(),
        "lift_EE": [
            [float(lift) if known else None for lift, known in zip(*row, strict=True)]
            for row in zip(lift_EE, known_EE, strict=True)
        ],
        "max_lift": float(lift_EE[others].max()) if others.any() else None,
    }
