"""glibc and Linux by ctypes. Standard library alone: a rank uses it before its first import of PyTorch."""

import ctypes
import platform
from contextlib import suppress

# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
LARGEST = 2**31 - 1
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def keep_freed_memory() -> bool:
    """Let malloc give freed memory out again instead of to the system; whether it could be told (glibc).

    The process then keeps the most that it ever held. `model.keep_freed_memory: false` turns it off.

    Reason: by default every large tensor is mapped anew, and the system fills its pages with zeros, one fault
        for each 4 KiB.
    Seen with: glibc 2.36, PyTorch 2.13 and 2.15 (tensors on the CPU are malloc's).
    Without it: up to half of a layer's time on the CPU goes to page faults.
    Canary: test_glibc.py::test_freed_memory_is_given_out_again
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(M_MMAP_MAX, 0)) and bool(libc.mallopt(M_TRIM_THRESHOLD, LARGEST))


def signal_at_parents_end(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends. Does nothing where there is no prctl.

    Reason: Python has no function for it.
    Seen with: Linux 6.18.
    Without it: ranks train on after their launcher was killed, and loader processes keep a dead rank's
        connections open.
    Canary: test_glibc.py::test_a_process_is_told_of_its_parents_end
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
