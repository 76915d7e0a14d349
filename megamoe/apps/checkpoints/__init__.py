"""The functions behind tools/checkpoint.py: inspect, verify, convert, average and prune checkpoints."""
