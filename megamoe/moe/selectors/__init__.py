"""Selectors: gate values [T, E] -> (token, expert) pairs."""
