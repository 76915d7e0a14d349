"""Selectors: gating values [T, E] -> (token, expert) pairs."""
