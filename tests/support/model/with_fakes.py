"""Helpers for checks on fake versions of Transformer Engine and Apex."""

from typing import Any

from megamoe.model import backends


def pretend_cuda() -> None:
    """Make the choice of backends, and nothing else, see a CUDA device."""
    backends.has_cuda = lambda: True
    backends.find_transformer_engine.cache_clear()
    backends.find_apex_norms.cache_clear()


def calls() -> list[Any]:
    """Return the fake library's calls since the previous call of this function."""
    from transformer_engine.pytorch import fp8

    found = list(fp8.calls)
    fp8.calls.clear()
    return found
