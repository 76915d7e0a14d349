"""Residuals: what a router adds to its scores from the MoE layer before."""
