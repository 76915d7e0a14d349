"""Recomputation that knows of FP8."""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch.utils.checkpoint

from .fp8 import FP8GlobalStateManager, fp8_autocast


class CudaRNGStatesTracker:
    """Megatron-Core makes a subclass of it; unused."""


def is_fp8_activation_recompute_enabled() -> bool:
    return False


def activation_recompute_forward(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("Megatron-Core's own recomputation is not used")


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = True,
    context_fn: Callable[[], Any] = lambda: (nullcontext(), nullcontext()),
    **kwargs: Any,
) -> Any:
    assert not use_reentrant
    recipe = FP8GlobalStateManager.get_fp8_recipe()

    @contextmanager
    def again(theirs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(theirs)
            stack.enter_context(fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe))
            yield

    def contexts() -> Any:
        first, second = context_fn()
        return first, again(second)

    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=contexts, **kwargs
    )
