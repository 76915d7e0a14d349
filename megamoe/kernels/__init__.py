"""Kernels that replace PyTorch's operators. Each has a reference implementation by PyTorch beside it.

Decisions, with their reasons:

- The CPU's kernels are plain C++ loaded by ctypes, built by the machine's GCC at the first start (5 s).
  PyTorch's headers take half a minute to compile and tie a build to a version.
- fp32 products are computed by the BLAS inside PyTorch, expert by expert; our own attempts came nowhere
  near. bf16 products are our own for AMX; libraries prepare them again for every number of rows.
- Our attention applies the rotary positions on the CPU and with Triton. Megatron-Core needs a dozen passes
  over queries and keys.
- Attention gets the documents' lengths (`attention/documents.py`) in the place of a mask of S x S; padding
  is a document of its own. Recomputation and ZeRO 3 treat the lengths like other inputs.
- The choice of kernels is a value (`Kernels`) that every pass gets: two models in one process can differ.
- A compiled pass takes its memory before its parallel region, which no exception may leave.
"""
