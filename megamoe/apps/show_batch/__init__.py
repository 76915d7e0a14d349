"""Shows what a batch of training holds: tokens, losses, documents and padding."""
