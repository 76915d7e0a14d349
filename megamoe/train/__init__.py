"""The loop, and the composition root that wires the rooms together."""
