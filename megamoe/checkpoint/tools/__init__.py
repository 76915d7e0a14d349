"""What is done to checkpoints while nothing trains: verified, described, converted, pruned."""
