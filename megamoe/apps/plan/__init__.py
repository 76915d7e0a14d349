"""Counts what training steps cost on a GPU, without one: the real code on fake tensors, and a roofline model.

Import `megamoe.apps.plan.cuda_device` and call `load` before anything imports torch.
"""
