"""Masks: which experts a token may choose, a mask [T, E] before the score function."""
