"""What is worked out by code of our own instead of PyTorch's operators, each beside a plain form of it."""
