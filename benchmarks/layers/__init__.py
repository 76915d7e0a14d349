"""Layers to measure: ours, its limit, and those of other libraries, with the same weights and routing."""
