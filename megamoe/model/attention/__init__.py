"""Attention of the blocks: its core, rotary positions, norms, latent attention, caches of keys and values."""
