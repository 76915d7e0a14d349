"""Where metrics go besides metrics.jsonl: Weights & Biases, TensorBoard."""
