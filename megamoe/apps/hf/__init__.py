"""Hugging Face folders: their models become checkpoints of ours, and ours become such folders.

It needs neither transformers nor a model in memory: a declarative map for each class says which tensors of a
folder lie where in which tensor of ours, and both directions follow from it.
"""
