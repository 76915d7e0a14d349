"""A fake of NVIDIA's Transformer Engine in plain PyTorch, for tests on machines without CUDA.

It has the names that Megatron-Core's wrapper and megamoe use, with the call signatures of version 2.20, and
is strict where the original is: dtypes, sizes under FP8, splits. It computes in the inputs' dtype: FP8 is a
flag here, kept in `pytorch.fp8.calls` with every product.
"""

from . import common, pytorch

__version__ = "2.20.2"
__all__ = ["common", "pytorch"]
