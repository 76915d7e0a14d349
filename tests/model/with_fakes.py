"""What the checks on stand-ins have in common."""

from typing import Any

from megamoe.model import backends


def say_cuda_is_here() -> None:
    """Nothing but the choice of backends believes it."""
    backends.has_cuda = lambda: True
    backends.find_transformer_engine.cache_clear()
    backends.find_apex_norms.cache_clear()


def calls() -> list[Any]:
    """What the stand-in has computed since it was asked last."""
    from transformer_engine.pytorch import fp8

    found = list(fp8.calls)
    fp8.calls.clear()
    return found
