"""Text and translations from a trained model: sampling, beam search, batches, the experts of each token."""
