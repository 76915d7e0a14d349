"""The functions behind tools/checkpoint.py: inspect, verify, convert and prune checkpoints."""
