"""The modules for PyTorch."""

from . import distributed, fp8, ops, router
from .distributed import checkpoint
from .fp8 import fp8_autocast, fp8_model_init
from .modules import DotProductAttention, GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm

autocast = fp8_autocast
__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "autocast",
    "checkpoint",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "ops",
    "router",
]
