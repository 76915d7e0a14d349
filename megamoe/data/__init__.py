"""Text to tokens on disk, and tokens to batches: everything before the embedding."""
