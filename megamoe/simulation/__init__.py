"""Counts what training steps cost on a GPU, without one: the real code on fake tensors, and a roofline model.

Import `megamoe.simulation.cuda_device` and call `load` before anything imports torch.
"""
