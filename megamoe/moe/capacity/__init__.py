"""Capacity: which of the wanted pairs are kept, [N] bool."""
