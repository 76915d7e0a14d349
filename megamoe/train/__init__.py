"""The trainer, which builds a run from all other packages; a training step; the training loop."""
