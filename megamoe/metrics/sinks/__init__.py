"""Outputs for metrics besides metrics.jsonl: Weights & Biases and TensorBoard."""
