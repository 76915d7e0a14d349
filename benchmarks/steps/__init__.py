"""Whole training steps: who takes them, and what is measured of one."""
