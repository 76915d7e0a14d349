"""The passes that take the time on a CPU, in C++: what `megamoe/kernels/library.py` declares."""
