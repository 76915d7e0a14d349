"""Metrics of the MoE layers under metrics.jsonl's names; docs/run/metrics.md has their formulas and units."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megamoe.metrics import names
from megamoe.metrics.names import LAYER_LOSS, fill
from megamoe.train.step_record import LayerRecord

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class RoutingHistory:
    """What the metrics keep of every MoE layer over the run's applied steps; checkpoints hold it.

    It is the same on every rank.

    experts_L: the number of experts of each layer. window: the number of steps without a pair after which an
    expert counts as dead. places: the places of the layers of each size, from 0; the counts of those of one
    size are one array.
    """

    def __init__(self, experts_L: Sequence[int], window: int) -> None:
        self.window = window
        self.steps = 0  # those that were taken in
        self.places: list[list[int]] = [
            [place for place, experts in enumerate(experts_L) if experts == size]
            for size in dict.fromkeys(experts_L)
        ]
        shapes = [(len(places), experts_L[places[0]]) for places in self.places]
        self.loads: list[Ints] = [np.zeros(shape, dtype=np.int64) for shape in shapes]  # pairs computed
        # Steps since the last pair.
        self._unused: list[Ints] = [np.zeros(shape, dtype=np.int64) for shape in shapes]

    def update(self, layers: Mapping[int, LayerRecord]) -> None:
        """Take in one applied step."""
        if not layers:
            return
        self.steps += 1
        seen = list(layers.values())
        for number, places in enumerate(self.places):
            load_LE = np.stack([seen[place].load_E.numpy() for place in places])
            self.loads[number] += load_LE
            self._unused[number] = np.where(load_LE > 0, 0, self._unused[number] + 1)

    def dead(self) -> list[Ints]:
        """Return how many experts of each layer computed no pair in the last `window` steps, by size."""
        return [(unused_LE >= self.window).sum(1) for unused_LE in self._unused]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {
            "steps": self.steps,
            "load": self._by_layer(self.loads),
            "unused": self._by_layer(self._unused),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; from one without this state, or of other sizes, begin anew."""
        if not state:
            return
        lists = [state.get(key, []) for key in ("load", "unused")]
        sizes = [[len(of_layer) for of_layer in found] for found in lists]
        if not sizes[0] == sizes[1] == [len(of_layer) for of_layer in self._by_layer(self.loads)]:
            return
        self.steps = int(state["steps"])
        self.loads, self._unused = (
            [np.array([found[place] for place in places], dtype=np.int64) for places in self.places]
            for found in lists
        )

    def _by_layer(self, arrays: list[Ints]) -> list[list[int]]:
        rows: dict[int, list[int]] = {}
        for places, array in zip(self.places, arrays, strict=True):
            rows.update(zip(places, array.tolist(), strict=True))
        return [rows[place] for place in range(len(rows))]


def routing_metrics(
    layers: dict[int, LayerRecord], micro_batches: int, history: RoutingHistory, expert_ranks: int
) -> dict[str, Any]:
    """Return the metrics of a step: of every layer, and their means over layers (for `dead` the sum).

    micro_batches: of the step, over all ranks. history: with this step. expert_ranks: ranks that share one
    set of experts (`Layout.expert`).
    """
    if not layers:
        return {}
    seen, found = list(layers.values()), []
    for places, load_of_run_LE, dead_L in zip(history.places, history.loads, history.dead(), strict=True):
        of_size = _of_one_size([seen[place] for place in places], load_of_run_LE, expert_ranks)
        found.append({**of_size, names.DEAD: dead_L})
    order_L = np.argsort(np.concatenate(history.places))
    by_name = {name: np.concatenate([of_size[name] for of_size in found])[order_L] for name in found[0]}
    metrics: dict[str, Any] = {}
    for place, (number, layer) in enumerate(layers.items()):
        keys = names.of_layer(number)
        metrics[keys[names.LOAD]] = layer.load_E.tolist()
        metrics[keys[names.WIDTH_HISTOGRAM]] = _trimmed(layer.width_D.tolist())
        if expert_ranks > 1:
            metrics[keys[names.RANK_LOAD]] = _by_rank(layer.load_E.numpy()[None], expert_ranks)[0].tolist()
        metrics |= {keys[name]: found_L[place].item() for name, found_L in by_name.items()}
        metrics |= {keys[fill(LAYER_LOSS, name)]: it / micro_batches for name, it in layer.losses.items()}
        metrics |= {keys[name]: it for name, it in layer.part_metrics.items()}
    for name, found_L in by_name.items():
        whole = found_L.sum() if name == names.DEAD else found_L.mean()
        metrics[names.over_layers(name)] = whole.item()
    return metrics


def _of_one_size(layers: list[LayerRecord], load_of_run_LE: Ints, expert_ranks: int) -> dict[str, Any]:
    """Return the metrics of layers with equally many experts by name, [L]."""
    load_LE = np.stack([layer.load_E.numpy() for layer in layers])
    wanted_LE = np.stack([layer.wanted_E.numpy() for layer in layers])
    imbalance_L = _max_over_mean(load_LE)
    return {
        names.IMBALANCE: imbalance_L,
        names.MAX_VIO: _violation(imbalance_L),
        names.LOAD_CV: _ratio(load_LE.std(1), load_LE.mean(1)),
        names.DROPPED: 1 - _ratio(load_LE.sum(1), wanted_LE.sum(1), where_none=1.0),
        names.MAX_VIO_RUN: _violation(_max_over_mean(load_of_run_LE)),
        names.DEAD: np.zeros(0),  # its place among the metrics
        **_token_metrics(layers),
        **_rank_metrics(load_LE, expert_ranks),
    }


def _token_metrics(layers: list[LayerRecord]) -> dict[str, Floats]:
    widths = [layer.width_D.numpy() for layer in layers]  # longer with experts that compute nothing
    tokens_L = np.array([width_D.sum() for width_D in widths])
    pairs_L = np.array([width_D @ np.arange(len(width_D)) for width_D in widths])
    return {
        names.EXPERTS_PER_TOKEN: _ratio(pairs_L, tokens_L),
        names.GATE_ENTROPY: _ratio(np.array([layer.entropy for layer in layers]), tokens_L),
        names.TOP1_PROB: _ratio(np.array([layer.top_1 for layer in layers]), tokens_L),
    }


def _rank_metrics(load_LE: Ints, ranks: int) -> dict[str, Floats]:
    """Return the imbalance over the expert-parallel ranks and the share of pairs above their mean."""
    if ranks == 1:
        return {}
    load_LR = _by_rank(load_LE, ranks)
    above_LR = np.maximum(load_LR - load_LR.mean(1, keepdims=True), 0)
    overload_L = _ratio(above_LR.sum(1), load_LR.sum(1))
    return {names.RANK_IMBALANCE: _max_over_mean(load_LR), names.RANK_OVERLOAD: overload_L}


def _by_rank(load_LE: Ints, ranks: int) -> Ints:
    """Return the load of each expert-parallel rank, which holds neighbouring experts: int64 [L, ranks]."""
    return load_LE.reshape(len(load_LE), ranks, -1).sum(2)


def _max_over_mean(load_LX: Ints) -> Floats:
    return _ratio(load_LX.max(1), load_LX.mean(1))


def _violation(imbalance_L: Floats) -> Floats:
    return np.maximum(imbalance_L - 1, 0)  # the imbalance is 0 without any load


def _ratio(top_L: NDArray[Any], bottom_L: NDArray[Any], where_none: float = 0.0) -> Floats:
    """Return the quotients; `where_none` where the divisor is 0."""
    found = np.full(len(top_L), where_none)
    return np.divide(top_L, bottom_L, out=found, where=bottom_L != 0)


def _trimmed(counts: list[int]) -> list[int]:
    """Return the counts without zeros at the end, but for the first."""
    last = max((place for place, count in enumerate(counts) if count), default=0)
    return counts[: last + 1]
