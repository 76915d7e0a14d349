"""Required experts: how many of a token's best experts reach a threshold."""

from typing import Any

import numpy as np

from megamoe.analysis.routing.collect import LayerPass


def required(layer: LayerPass, thresholds: tuple[float, ...]) -> dict[str, Any]:
    """Return for each threshold the number m of experts that tokens need, over all tokens of the pass.

    m is the smallest number with p_1 + ... + p_m >= t (p_1 + ... + p_E), p sorted from the largest. Returns
    by threshold: mean, and tokens_M, the number of tokens with m = 1, 2, ..., E.

    Source: Yang et al. 2024 (XMoE), figure 5; eq. 5 and algorithm 1 for m.
    """
    found = {}
    for threshold, row_E in zip(thresholds, layer.required_CE.numpy(), strict=True):
        number_E = np.arange(1, len(row_E) + 1)
        mean = float((row_E * number_E).sum() / max(row_E.sum(), 1))
        found[f"{threshold:g}"] = {"mean": mean, "tokens_M": row_E.tolist()}
    return found
