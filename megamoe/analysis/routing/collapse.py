"""Representation collapse: how much the hidden states of one expert's tokens still differ."""

import numpy as np
from numpy.typing import NDArray

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
