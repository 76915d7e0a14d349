"""The trainer, which builds a run from all other packages; one training step; the loop."""
