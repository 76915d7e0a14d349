"""Consistency between runs, fluctuation between checkpoints, and collapse of the experts' representations."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megamoe.apps.routing_analysis.collect import LayerPass


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


def fluctuation(earlier: LayerPass, later: LayerPass) -> dict[str, float]:
    """Compare the choices of two checkpoints for the same sampled tokens.

    Returns:
        first: the share of tokens whose first choice differs: the RF ratio. chosen: the mean over tokens of
        1 - |A and B| / |A or B| for the sets A and B of all chosen experts; equal to `first` where each token
        has one expert.

    Source: Chi et al. 2022 (X-MoE), section 4.5 and figure 3a, where each token has one expert; `chosen` is
    ours, for several.
    """
    return {
        "first": changed_first(earlier.first_S.numpy(), later.first_S.numpy()),
        "chosen": changed_sets(earlier.chosen_SE.numpy(), later.chosen_SE.numpy()),
    }


def changed_first(earlier_S: NDArray[np.int64], later_S: NDArray[np.int64]) -> float:
    """Return the share of tokens whose expert differs; -1, no expert, counts like an expert."""
    return float((earlier_S != later_S).mean()) if len(earlier_S) else 0.0


def changed_sets(earlier_SE: NDArray[np.bool_], later_SE: NDArray[np.bool_]) -> float:
    """Return the mean Jaccard distance of the tokens' sets of experts; two empty sets have distance 0."""
    both_S = (earlier_SE & later_SE).sum(1)
    any_S = (earlier_SE | later_SE).sum(1)
    same_S = np.where(any_S > 0, both_S / np.maximum(any_S, 1), 1.0)
    return float(1 - same_S.mean()) if len(same_S) else 0.0


Floats = NDArray[np.float64]
SMALLEST = 1e-12  # an eigenvalue of the between-class covariance below this share of the largest counts as 0


def representation_collapse(hidden_SH: NDArray[np.floating], first_S: NDArray[np.int64]) -> float | None:
    """Return RC = Tr(W B+), with the covariances W within and B between classes; B+ is the pseudo inverse.

    A token's class is the expert that it chose first. With n_k tokens, mean m_k and class k of N tokens in
    all, and the mean m of all: W = 1/N sum_k sum_(i in k) (h_i - m_k)(h_i - m_k)^T and
    B = sum_k n_k/N (m_k - m)(m_k - m)^T. A smaller RC means more collapse.

    hidden_SH: the router's input [S, H]. first_S: int64 [S], -1 for a token without an expert, which is left
    out. None: fewer than two classes, or all of them have one mean.

    Source: Chi et al. 2022 (X-MoE), eq. 11, after Zhu et al. 2021, whose classes have equal sizes and who
    divide by the number of classes as well. Where sizes differ, the papers do not say how B weights the
    classes. Here each counts with its share of the tokens, so that W + B is the covariance of all tokens.
    """
    has_S = first_S >= 0
    hidden, expert = hidden_SH[has_S].astype(np.float64), first_S[has_S]
    classes, class_S, size_K = np.unique(expert, return_inverse=True, return_counts=True)
    if len(classes) < 2:
        return None
    mean_KH: Floats = np.zeros((len(classes), hidden.shape[1]))
    np.add.at(mean_KH, class_S, hidden)
    mean_KH /= size_K[:, None]
    between_KH = (mean_KH - hidden.mean(0)) * np.sqrt(size_K / len(hidden))[:, None]
    # B = between^T between has the eigenvectors `axes` and the eigenvalues `scale` squared.
    _, scale, axes = np.linalg.svd(between_KH, full_matrices=False)
    real = scale**2 > SMALLEST * max(scale[0] ** 2, np.finfo(np.float64).tiny)
    if not real.any():
        return None
    along = (hidden - mean_KH[class_S]) @ axes[real].T
    return float(((along**2).mean(0) / scale[real] ** 2).sum())
