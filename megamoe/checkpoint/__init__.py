"""Checkpoints: saving and resuming a run, and starting from another run's weights.

Decisions, with their reasons:

- A checkpoint holds logical tensors, in rectangular chunks (`parallel/chunks.py`), so that it does not
  depend on the layout. Weights are saved once, as fp32 masters.
- PyTorch's distributed checkpointing plans, safetensors stores: PyTorch's reader unpickles.
- The background writer does not communicate. The vote of each step tells when all have written, so that no
  collective runs beside those of training.
- Checksums have the format of `sha256sum`: the list needs none of its own.
"""
