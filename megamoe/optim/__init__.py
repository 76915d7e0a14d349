"""Optimizers, parameter groups, clipping, and schedules of the learning rate and the batch size."""
