"""A cache of the results of reading a whole file, so that the file is read again only if it has changed.

The results (the file's SHA-256, its largest token id) are stored with the file's size, inode and times, and
are valid while these are the same. One of the times is that of the last status change (ctime), which no
program can set back.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from megamoe.errors import UserError
from megamoe.plain_files import replace_file

CHUNK_BYTES = 1 << 22
# A file may change twice within one tick of its file system's clock, so a recent file is read again.
SETTLED_S = 2.0
MOST_BYTES_OF_RESULTS = 1 << 16

Results = dict[str, Any]


class ScanCache:
    """The results for files, stored as a small JSON file for each in `folder`. None: nothing is stored."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def of(self, path: Path, wanted: Iterable[str], find: Callable[[], Results]) -> Results:
        """Return at least the `wanted` results for `path`: the stored ones if the file has not changed,
        otherwise those of `find()`.

        Raises:
            UserError: if the file cannot be read, or changes while it is read.
        """
        state = _state(path)
        known = self._read(path, state)
        if known is not None and set(wanted) <= known.keys():
            return known
        begun = time.time()
        results = find()
        if _state(path) != state:
            raise UserError(f"data file {str(path)!r} changed while it was read; start again")
        if max(state["changed_ns"], state["modified_ns"]) < (begun - SETTLED_S) * 1e9:
            self._keep(path, state, results)
        return results

    def has(self, path: Path) -> bool:
        """Return whether results are stored for the file's current state."""
        return self._read(path, _state(path)) is not None

    def _place(self, path: Path) -> Path | None:
        name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
        return self._folder and self._folder / f"{path.name}.{name}.json"

    def _read(self, path: Path, state: Results) -> Results | None:
        place = self._place(path)
        if place is None:
            return None
        try:
            with open(place, "rb") as file:
                content = json.loads(file.read(MOST_BYTES_OF_RESULTS))
            if content["checksum"] == _checksum(state, content["facts"]):
                return dict(content["facts"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            pass  # missing or damaged: the file is read again
        return None

    def _keep(self, path: Path, state: Results, results: Results) -> None:
        place = self._place(path)
        if place is None:
            return
        content = {"state": state, "facts": results, "checksum": _checksum(state, results)}
        with suppress(OSError):  # an unwritable cache is reported by the code that needs it
            place.parent.mkdir(parents=True, exist_ok=True)
            replace_file(place, json.dumps(content).encode())


def _state(path: Path) -> Results:
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    return {
        "path": str(path.resolve()),
        "size": status.st_size,
        "inode": status.st_ino,
        "modified_ns": status.st_mtime_ns,
        "changed_ns": status.st_ctime_ns,
    }


def _checksum(state: Results, results: Results) -> str:
    return hashlib.sha256(json.dumps([state, results], sort_keys=True).encode()).hexdigest()


def unreadable(path: Path, error: OSError) -> UserError:
    """Return the error for a data file that cannot be read."""
    return UserError(f"data file {str(path)!r} cannot be read: {error.strerror or error}")


def scan(
    path: Path, *, dtype: str | None = None, hashed: bool = True, stop: threading.Event | None = None
) -> Results:
    """Read a file once; return its `sha256` if `hashed`, and its smallest and largest number under the key
    `dtype`.

    Takes CHUNK_BYTES of memory.

    Args:
        dtype: the dtype of the numbers that the file consists of; None: do not look at them.
        stop: an event that another thread sets to interrupt the reading.

    Raises:
        UserError: if the file cannot be read, or the reading was interrupted.
    """
    digest = hashlib.sha256()
    smallest, largest = [], []
    memory = memoryview(bytearray(CHUNK_BYTES))
    buffer = np.frombuffer(memory, np.uint8)
    try:
        with open(path, "rb", buffering=0) as file:
            while size := _fill(file, memory):
                if stop is not None and stop.is_set():
                    raise UserError(f"data file {str(path)!r}: reading was interrupted")
                if hashed:
                    digest.update(memory[:size])
                if dtype is not None:
                    numbers_N = buffer[: size - size % np.dtype(dtype).itemsize].view(dtype)
                    smallest.append(int(numbers_N.min(initial=0)) if dtype[0] == "i" else 0)
                    largest.append(int(numbers_N.max(initial=0)))
    except OSError as error:
        raise unreadable(path, error) from error
    results: Results = {"sha256": digest.hexdigest()} if hashed else {}
    if dtype is not None:
        results[dtype] = [min(smallest, default=0), max(largest, default=0)]
    return results


def _fill(file: Any, buffer: memoryview) -> int:
    """Fill the buffer; return the number of bytes read, which is smaller at the end of the file alone."""
    size = 0
    while size < len(buffer) and (found := file.readinto(buffer[size:])):
        size += found
    return size
