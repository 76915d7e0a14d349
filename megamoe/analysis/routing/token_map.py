"""A map of tokens in two dimensions, to be coloured by expert."""

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megamoe.analysis.routing.collect import LayerPass

POINTS = 2000  # more of them hide each other
NEIGHBOURS, MIN_DISTANCE = 100, 1.0  # as in the paper
Floats = NDArray[np.floating]


def token_map(layer: LayerPass) -> dict[str, Any]:
    """Place the first `POINTS` sampled tokens on a plane.

    The vectors are the router's input, or what its scorer makes of it where it compares tokens and experts in
    a space of its own. Returns method: `umap` if the package umap-learn is installed, otherwise `pca`.
    xy_S2: coordinates without a unit. first_S: the first expert of each, -1 for none. explained: for PCA, the
    two axes' shares of the variance.

    Source: Chi et al. 2022 (X-MoE), figures 2a and 2b: UMAP with 100 neighbours and a minimum distance of 1.
    """
    vectors = layer.hidden_SH if layer.projected_SD is None else layer.projected_SD
    vectors_SD, first_S = vectors[:POINTS].double().numpy(), layer.first_S[:POINTS]
    found: dict[str, Any] = {"first_S": first_S.tolist()}
    xy_S2 = umap_of(vectors_SD) if len(vectors_SD) > 3 else None
    if xy_S2 is not None:
        return {"method": "umap", "xy_S2": xy_S2.round(4).tolist(), **found}
    xy_S2, explained = pca(vectors_SD)
    return {"method": "pca", "explained": explained, "xy_S2": xy_S2.round(4).tolist(), **found}


def pca(vectors_SD: Floats) -> tuple[Floats, list[float]]:
    """Return the first two principal components [S, 2], and the shares of the variance that they have.

    The sign of an axis is such that its entry of the largest absolute value is positive.
    """
    if not len(vectors_SD):
        return np.zeros((0, 2)), [0.0, 0.0]
    centred = vectors_SD - vectors_SD.mean(0)
    left, scale, axes = np.linalg.svd(centred, full_matrices=False)
    axes_2D = axes[:2]
    sign = np.sign(axes_2D[np.arange(len(axes_2D)), np.abs(axes_2D).argmax(1)])
    total = max(float((scale**2).sum()), np.finfo(np.float64).tiny)
    xy_S2 = left[:, :2] * scale[:2] * sign
    missing = 2 - xy_S2.shape[1]  # one token or one dimension has one axis
    shares = [float(value**2) / total for value in scale[:2]] + [0.0] * missing
    return np.pad(xy_S2, ((0, 0), (0, missing))), shares


def umap_of(vectors_SD: Floats) -> Floats | None:
    """Return UMAP's two dimensions [S, 2], the same in every call; None if umap-learn cannot be imported."""
    try:
        umap = importlib.import_module("umap")
    except ImportError:
        return None
    neighbours = min(NEIGHBOURS, len(vectors_SD) - 1)
    reducer = umap.UMAP(
        n_neighbors=neighbours, min_dist=MIN_DISTANCE, n_components=2, random_state=0, n_jobs=1
    )
    return np.asarray(reducer.fit_transform(vectors_SD), dtype=np.float64)
