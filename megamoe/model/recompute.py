"""Activation recomputation: backward computes a function's activations again instead of storing them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megamoe.moe.layer import MoELayer


def recomputed(
    function: Callable[..., Any], layers: list[MoELayer], fp8: bool, *args: Any, **kwargs: Any
) -> Any:
    """Return function(*args, **kwargs), recomputed in backward with the same random draws.

    layers: the MoE layers inside, whose `recomputing` is set meanwhile. The non-reentrant form keeps the
    graph of the first computation, so a routing that an objective uses later still carries gradient. What is
    recomputed, including collectives, depends on the graph's shape alone and is the same on all ranks.

    fp8: the products are Transformer Engine's in FP8. Its own checkpoint function is then used: it enters the
    FP8 context again in backward, and reuses the first computation's `delayed` scales.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    options: dict[str, Any] = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), _Again(layers))}
    if fp8:
        from transformer_engine.pytorch import checkpoint as engine_checkpoint

        return engine_checkpoint(function, *args, **options, **kwargs)
    return checkpoint(function, *args, **options, **kwargs)


class _Again(AbstractContextManager[None]):
    """Marks layers as being recomputed; may be entered again, for a second backward pass."""

    def __init__(self, layers: list[MoELayer]) -> None:
        self.layers = layers

    def __enter__(self) -> None:
        self._mark(True)

    def __exit__(self, *unused: object) -> None:
        self._mark(False)

    def _mark(self, recomputing: bool) -> None:
        for layer in self.layers:
            layer.recomputing = recomputing
