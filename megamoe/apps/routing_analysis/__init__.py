"""Analyses of what a trained router does: a pass over a data set, and a file for each question."""
