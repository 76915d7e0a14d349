"""Freed memory that stays, by what the system counts in a process of its own; a parent's end."""

import os
import platform
import subprocess
import sys

import pytest

from megamoe.compat import glibc

# Without large pages a fault is 4 KiB. A bytearray is malloc's memory, as a tensor is, and all written.
COUNT_FAULTS = """
import ctypes, resource, sys
from megamoe.compat.glibc import keep_freed_memory
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE
if sys.argv[1] == "keep":
    assert keep_freed_memory() is True
bytearray(2**26)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    bytearray(2**26)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 4)
"""


def faults(choice: str) -> int:
    """Page faults for each 64 MiB that is taken, written and freed."""
    done = subprocess.run([sys.executable, "-c", COUNT_FAULTS, choice], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
def test_freed_memory_is_given_out_again() -> None:
    assert faults("keep") < 16
    assert faults("free") > 1000


def test_another_malloc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glibc.platform, "libc_ver", lambda: ("", ""))
    assert glibc.keep_freed_memory() is False


# The child has the test's pipe as its output: the pipe is closed when the last process that holds it ends.
CHILD_OF_A_PARENT_THAT_ENDS = """
import os, signal, time
from megamoe.compat.glibc import signal_at_parents_end
ready, tell = os.pipe()
if os.fork() == 0:
    signal_at_parents_end(signal.SIGKILL)
    os.write(tell, b"x")
    time.sleep(60)
os.read(ready, 1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_process_is_told_of_its_parents_end() -> None:
    subprocess.run([sys.executable, "-c", CHILD_OF_A_PARENT_THAT_ENDS], capture_output=True, timeout=20)
    assert not hasattr(os, "prctl"), "Python has a function for it now"
