"""Parallel text: reading it from files, preparing it, and batches of it."""
