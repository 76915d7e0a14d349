"""Inter-run consistency: whether runs of different seeds load their experts alike."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def correlations(load_RE: ArrayLike) -> NDArray[np.float64] | None:
    """Return Pearson's correlation of each two of R runs' loads, [R, R]; None if a load is constant."""
    load = np.asarray(load_RE, dtype=np.float64)
    centred = load - load.mean(1, keepdims=True)
    norm = np.sqrt((centred**2).sum(1))
    if load.shape[1] < 2 or not norm.all():
        return None
    unit = centred / norm[:, None]
    return np.clip(unit @ unit.T, -1.0, 1.0)


def inter_run_consistency(load_RE: ArrayLike) -> float | None:
    """Return IC, the mean of the whole correlation matrix: sum over i, j of rho(l_i, l_j) / m^2.

    load_RE: for each of m runs, the number of tokens that each expert was chosen for. The diagonal is part of
    the mean, so m unrelated runs have about 1/m. None: the load of a run is constant, which has no
    correlation.

    Source: Chi et al. 2022 (X-MoE), section 4.5 and figure 3b, for fine-tuned copies of one model. Runs that
    were initialised with different seeds number their experts differently, and IC is then about 1/m.
    """
    found = correlations(load_RE)
    return None if found is None else float(found.mean())
