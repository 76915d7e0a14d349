"""Scorers: hidden states [T, H] -> scores [T, E]."""
