"""Kernels that replace PyTorch's operators. Each has a reference implementation by PyTorch beside it."""
