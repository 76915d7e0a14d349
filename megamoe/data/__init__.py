"""Text to tokens on disk, tokens to batches: everything before the embedding."""
