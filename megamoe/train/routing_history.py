"""What the routing metrics keep over steps: the load of the run so far, and each expert's last use."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megamoe.train.step_record import LayerRecord


class RoutingHistory:
    """Of every MoE layer, over the applied steps of the run; the same on every rank, saved in checkpoints.

    load_LE: int64, the pairs that each expert computed. window: the number of steps without a pair after
    which an expert counts as dead.
    """

    def __init__(self, layers: int, num_experts: int, window: int) -> None:
        self.window = window
        self.steps = 0  # those that were taken in
        self.load_LE: NDArray[np.int64] = np.zeros((layers, num_experts), dtype=np.int64)
        self._unused_LE = np.zeros_like(self.load_LE)  # steps since each expert's last pair

    def update(self, layers: Mapping[int, LayerRecord]) -> None:
        """Take in one applied step."""
        if not layers:
            return
        load_LE = np.stack([layer.load_E.numpy() for layer in layers.values()])
        self.steps += 1
        self.load_LE += load_LE
        self._unused_LE = np.where(load_LE > 0, 0, self._unused_LE + 1)

    def dead_L(self) -> NDArray[np.int64]:
        """Return how many experts of each layer computed no pair in the last `window` steps, int64 [L]."""
        return (self._unused_LE >= self.window).sum(1)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"steps": self.steps, "load": self.load_LE.tolist(), "unused": self._unused_LE.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; from one without this state, or of other sizes, begin anew."""
        load, unused = (np.array(state.get(key, []), dtype=np.int64) for key in ("load", "unused"))
        if load.shape == unused.shape == self.load_LE.shape:
            self.steps, self.load_LE, self._unused_LE = int(state["steps"]), load, unused
