"""Random numbers that differ between tensor-parallel ranks, drawn from their common random state.

Megatron-Core keeps a second state for dropout on tensor-parallel activations, which needs CUDA. Here such a
draw is seeded with a number from torch's own state, which is the same on all tensor-parallel ranks, plus the
rank. So there is one state to save, and to restore when a block is recomputed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

from megamoe.compat.megatron_compat import set_random_tracker


class OneStream(CudaRNGStatesTracker):
    """Megatron-Core's tracker of random states, without states of its own."""

    def is_initialized(self) -> bool:
        """Always true."""
        return True

    @contextmanager
    def fork(self, name: Any = None) -> Iterator[None]:
        """Context in which each tensor-parallel rank draws separately; afterwards all ranks have the same
        state.
        """
        seed = int(torch.randint(2**62, (1,), device="cpu")) + get_tensor_model_parallel_rank()
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            yield


def use_one_stream() -> None:
    """Make Megatron-Core's modules use this tracker."""
    set_random_tracker(OneStream())
