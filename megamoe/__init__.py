"""megamoe: pretrain Mixture-of-Experts language models from parts that plug in and compose."""

__version__ = "0.1.0"
