"""Activation recomputation: what a function would keep for its backward pass is worked out again there."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megamoe.moe.layer import MoELayer


def recomputed(
    function: Callable[..., Any], layers: list[MoELayer], fp8: bool, *args: Any, **kwargs: Any
) -> Any:
    """function(*args, **kwargs), computed again in backward with the same random draws.

    layers: the MoE layers inside, which are told when they are computed a second time. The non-reentrant
    form keeps the graph of the first computation: a routing that an objective waits with still carries its
    gradient. What is computed again, collectives too, follows from the graph's shape alone and so is the same
    on all ranks.

    fp8: the products are Transformer Engine's in FP8. Its own form of the same is taken then: backward is
    outside of the FP8 context, which must be entered again, and `delayed` scales must be those of the first
    time.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    options: dict[str, Any] = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), _Again(layers))}
    if fp8:
        from transformer_engine.pytorch import checkpoint as engine_checkpoint

        return engine_checkpoint(function, *args, **options, **kwargs)
    return checkpoint(function, *args, **options, **kwargs)


class _Again(AbstractContextManager[None]):
    """The layers are computed a second time; may be entered again, for a second backward pass."""

    def __init__(self, layers: list[MoELayer]) -> None:
        self.layers = layers

    def __enter__(self) -> None:
        self._mark(True)

    def __exit__(self, *unused: object) -> None:
        self._mark(False)

    def _mark(self, recomputing: bool) -> None:
        for layer in self.layers:
            layer.recomputing = recomputing
