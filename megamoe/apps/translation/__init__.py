"""Parallel text: reading it from files and message catalogues, preparing it, and batches of it."""
