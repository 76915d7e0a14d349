"""Attention: causal, with variants, within documents; rotary positions."""
