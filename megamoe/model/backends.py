"""Which accelerators of the model are on this machine: found, never required."""

import importlib.util

import torch


def find_backends() -> dict[str, str]:
    """CUDA, Transformer Engine and Apex: whether each is here."""
    return {
        "CUDA": torch.cuda.get_device_name() if torch.cuda.is_available() else "none: CPU, gloo",
        "Transformer Engine": _state("transformer_engine.pytorch"),
        # PyPI's `apex` is another package: NVIDIA's has this module.
        "Apex": _state("apex.normalization"),
    }


def _state(module: str) -> str:
    try:
        found = importlib.util.find_spec(module) is not None
    except ImportError:
        found = False
    return "found, but not used yet" if found else "none"
