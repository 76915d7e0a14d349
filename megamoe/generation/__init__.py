"""Text from a trained model: sampling, batches of prompts, the experts of each token."""
