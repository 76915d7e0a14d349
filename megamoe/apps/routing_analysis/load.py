"""The load of the experts in training and inference mode, which experts are chosen together, and how many
a token needs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.apps.routing_analysis.collect import LayerPass, RoutingPass, TokenSample, collect
from megamoe.moe.layer import MoELayer

DRAWS = 4  # passes in training mode, each with the random draws of another step


def training_load(
    trained: TrainedModel, dataset: Any, samples: int, layers: dict[int, MoELayer]
) -> dict[int, NDArray[np.int64]]:
    """Return the pairs that each expert computes with its layer in training mode, int64 [E] by layer.

    These are sums over `DRAWS` passes, with the random draws (noise, jitter, expert dropout) of the steps
    that would follow. The MoE layers are in training mode, with their capacity for training; the rest of the
    model has no dropout, so the tokens of the first MoE layer are those of inference. Collective.
    """
    sums: dict[int, NDArray[np.int64]] = {}
    nothing, first_step = TokenSample.draw(0, 0), trained.context.step
    try:
        with _in_training(trained):
            for draw in range(DRAWS):
                trained.context.step = first_step + draw
                found = collect(trained, dataset, samples, sample=nothing, layers=layers)
                for number, layer in found.layers.items():
                    sums[number] = sums.get(number, 0) + layer.load_E.numpy()
    finally:
        trained.context.step = first_step
    return sums


def compare_loads(inference: RoutingPass, training: dict[int, NDArray[np.int64]]) -> dict[str, Any]:
    """Return by layer the share f_i of the pairs that expert i computes in each mode, and their distance.

    inference, training: f_E. distance: half the sum of |difference|, between 0 and 1. inference_max_over_mean
    and training_max_over_mean: the largest share over the mean share.

    Source: Xie et al. 2022 (MoEC), figure 5, which shows f of one cluster in both modes; f_i is that of their
    balance loss (eq. 3). The distance is ours (total variation).
    """
    found = {}
    for number, layer in inference.layers.items():
        calm_E, noisy_E = shares(layer.load_E.numpy()), shares(training[number])
        found[str(number)] = {
            "inference": calm_E.tolist(),
            "training": noisy_E.tolist(),
            "distance": float(np.abs(calm_E - noisy_E).sum() / 2),
            "inference_max_over_mean": float(calm_E.max() * len(calm_E)),
            "training_max_over_mean": float(noisy_E.max() * len(noisy_E)),
        }
    return found


def shares(load_E: ArrayLike) -> NDArray[np.float64]:
    """Return each expert's share of the pairs; 0 for all where there is no pair."""
    load = np.asarray(load_E, dtype=np.float64)
    return load / max(load.sum(), 1.0)


@contextmanager
def _in_training(trained: TrainedModel) -> Iterator[None]:
    layers = [layer for _, layer in trained.model.moe_layers()]
    try:
        for layer in layers:
            layer.train()
        yield
    finally:
        for layer in layers:
            layer.eval()


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
