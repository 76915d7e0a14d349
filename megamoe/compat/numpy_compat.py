"""NumPy: the map behind a numpy.memmap."""

from typing import Any


def open_map(array: Any) -> Any:
    """Return the mmap.mmap of a numpy.memmap or of a view of one; None for an array in memory.

    Reason: `size` of the map asks for the file's present size; the array itself does not know.
    Seen with: NumPy 2.4 and 2.5.
    Without it: a data file cut short during a run ends it with SIGBUS instead of a line.
    Canary: test_numpy.py::test_open_map
    """
    return getattr(array, "_mmap", None)
