"""Checkpoints: saving and resuming a run, and starting from another run's weights."""
