"""Selectors: probabilities [T, E] -> (token, expert) pairs."""
