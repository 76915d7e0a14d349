"""The decoder, the encoder and the encoder-decoder, and what they have in common."""
