"""Checkpoints: of a run, whole or not at all; and another run's weights to start from."""
