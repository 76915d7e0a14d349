"""Memory that is freed stays with the process, for the next step."""

import ctypes
import platform

# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let malloc give freed memory out again instead of to the system; whether it could be told (glibc).

    By default every large tensor is mapped anew, and the system fills its pages with zeros, one fault for
    each 4 KiB: up to half of a layer's time on the CPU. The process then keeps the most that it ever held.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(M_MMAP_MAX, 0)) and bool(libc.mallopt(M_TRIM_THRESHOLD, LARGEST))
