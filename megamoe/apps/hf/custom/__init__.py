"""The export of decoders that no class of transformers expresses: a class of their own, in plain PyTorch."""
