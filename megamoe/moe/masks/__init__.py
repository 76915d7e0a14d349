"""Masks: bool [T, E], which experts a token may choose; applied before the score function."""
