"""Megatron-Core on a machine without CUDA.

Megatron-Core asks `torch.cuda.current_device()` where tensors go. Where there is no CUDA device the
answer must be the CPU; nothing else of it needs replacing for the modules that this project uses.
"""

import torch


def stand_in_for_cuda() -> None:
    """Let `torch.cuda.current_device()` answer the CPU where no CUDA device exists."""
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
