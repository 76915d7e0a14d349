"""Which accelerators of the model are on this machine: found, never required."""

import importlib.util

import torch


def find_backends() -> dict[str, str]:
    """CUDA, Transformer Engine and Apex, and what is used where each is missing."""
    return {
        "CUDA": torch.cuda.get_device_name() if torch.cuda.is_available() else "none: CPU, gloo",
        "Transformer Engine": "found" if _has("transformer_engine.pytorch") else "none: torch layers",
        # PyPI's `apex` is another package: NVIDIA's has these modules.
        "Apex": "found"
        if _has("apex.normalization") and _has("apex.optimizers")
        else "none: torch norms, AdamW",
    }


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
