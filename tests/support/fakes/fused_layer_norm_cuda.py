"""Stands for compiled kernels of Apex, which tell a whole installation from a bare one."""
