"""Load in training and in inference mode: whether the experts get the same tokens with the router's noise."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megamoe.analysis.routing.collect import RoutingPass, collect
from megamoe.analysis.routing.sample import TokenSample
from megamoe.analysis.trained_model import TrainedModel
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
