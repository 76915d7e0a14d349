"""Random numbers that differ between tensor-parallel ranks, from the one state that they share.

Megatron-Core keeps a second state beside torch's, for dropout on what tensor parallelism cuts, and needs
CUDA for it. Here such a draw is seeded with a number drawn from torch's own state, which is the same on all
tensor-parallel ranks, plus the rank. There is one state to save, to restore, and to go back to when a block
is computed again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

from megamoe.compat.megatron_compat import set_random_tracker


class OneStream(CudaRNGStatesTracker):
    """Megatron-Core's tracker without states of its own."""

    def is_initialized(self) -> bool:
        """It always is."""
        return True

    @contextmanager
    def fork(self, name: Any = None) -> Iterator[None]:
        """Within it, this tensor-parallel rank draws for itself; after it, all ranks go on alike."""
        seed = int(torch.randint(2**62, (1,), device="cpu")) + get_tensor_model_parallel_rank()
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            yield


def use_one_stream() -> None:
    """Let Megatron-Core's modules draw so."""
    set_random_tracker(OneStream())
