"""Capacity: which of the wanted pairs survive, [N] bool."""
