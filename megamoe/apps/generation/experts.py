"""The experts of each token while a model generates."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from megamoe.apps.evaluation.trained_model import TrainedModel, hooked
from megamoe.moe.routing import Routing

Experts = dict[str, list[tuple[int, float]]]  # by layer: (expert, weight) in order of choice


class ExpertRecord:
    """What the routers of a model chose for each token of a batch.

    by_token: for each sequence, the experts of each position. Only the pairs that were computed count.
    """

    def __init__(self) -> None:
        self.by_token: dict[int, dict[int, Experts]] = defaultdict(dict)
        self._last: dict[str, Routing] = {}

    def watching(self, trained: TrainedModel) -> AbstractContextManager[None]:
        """Record the routings of the model's forward passes meanwhile."""
        names: dict[nn.Module, str] = {}
        for number, layer in trained.model.moe_layers():
            is_known = str(number) in names.values()
            names[layer.router] = f"{number} inserted" if is_known else str(number)

        def keep(router: nn.Module, inputs: Any, options: Any, routing: Routing) -> None:
            self._last[names[router]] = routing

        return hooked((router, keep) for router in names)

    def take(self, position_BS: Tensor) -> None:
        """Keep what the last forward pass chose; position_BS: int64 on the CPU, -1 for no token."""
        batch = len(position_BS)
        positions = position_BS.T.reshape(-1).tolist()  # token s * B + b
        for place, position in enumerate(positions):
            if position >= 0:
                self.by_token[place % batch][position] = {name: [] for name in self._last}
        for name, routing in self._last.items():
            pairs = routing.pairs
            columns = (pairs.token_N.tolist(), pairs.expert_N.tolist(), pairs.weight_N.tolist())
            for token, expert, weight in zip(*columns, strict=True):
                if token < len(positions) and positions[token] >= 0:  # else an empty place, or padding
                    self.by_token[token % batch][positions[token]][name].append((expert, weight))


def lines_of_experts(texts: list[str], experts: list[Experts]) -> Iterator[str]:
    """Yield a line for each token: its text, and by layer its experts with their weights."""
    width = max((len(repr(text)) for text in texts), default=0)
    for text, by_layer in zip(texts, experts, strict=True):
        layers = [f"layer {name}: {_pairs(pairs)}" for name, pairs in by_layer.items()]
        yield f"{text!r:>{width}}  {'   '.join(layers)}".rstrip()


def _pairs(pairs: list[tuple[int, float]]) -> str:
    return " ".join(f"{expert} ({weight:.2f})" for expert, weight in pairs) or "none"
