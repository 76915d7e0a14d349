"""The sections of `gpu_check.py`, a module each."""
