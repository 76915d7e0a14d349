"""Routing fluctuation: how many tokens change their expert between two checkpoints."""

import numpy as np
from numpy.typing import NDArray

from megamoe.analysis.routing.collect import LayerPass


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
