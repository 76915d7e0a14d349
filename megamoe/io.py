"""Reads files named by a user: plain files only, with a bound on their size; replaces files as a whole.

A pipe would block the reader, and a device such as /dev/zero never ends.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

# Files of a run, in its folder.
METRICS_FILE, CONFIG_FILE, SUMMARY_FILE = "metrics.jsonl", "config.yaml", "summary.json"
TEMPORARY = ".tmp"  # the end of the name of a file that is not in place yet


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file, or a link to one, for reading.

    Raises:
        OSError: if it cannot be opened; IsADirectoryError if it is a folder.
        ValueError: if it is a pipe, a device or a socket, or if the path holds a NUL.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise ValueError("a pipe, device or socket, expected a plain file")


def read_plain(path: Path, largest: int) -> bytes:
    """Return the content of a plain file of at most `largest` bytes.

    Raises:
        OSError, ValueError: as `open_plain`; ValueError also if the file is larger.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size  # 0 for the kernel's virtual files
        content = file.read(largest + 1) if size <= largest else b""
    if max(size, len(content)) > largest:
        raise ValueError(f"larger than {largest:,} bytes")
    return content


@contextmanager
def replacing(path: Path, synced: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file, and put it in place in one move: a reader meets the old content or the new.

    synced: flush it to the disk before.

    Raises:
        OSError: naming the file, if it cannot be written; the old file stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            if synced:
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes, synced: bool = False) -> None:
    """Write a whole file by `replacing`."""
    with replacing(path, synced) as file:
        file.write(content)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def reason(error: Exception) -> str:
    """Return what `open_plain` or `read_plain` raised, in a few words."""
    return str((isinstance(error, OSError) and error.strerror) or error)
