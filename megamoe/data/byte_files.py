"""Reading the tokens of a prepared dataset by place: from a local disk, or from object storage."""

import os
from pathlib import Path
from typing import Protocol

from megamoe.data.blocks import StoredBytes, Stub
from megamoe.errors import UserError
from megamoe.io import open_plain, reason

REMEDY = "prepare it again under another name, or put it back, and go on with --resume"


class ByteFile(Protocol):
    """An open file that does not change. name: for messages. size: in bytes."""

    name: str
    size: int

    def read(self, at: int, size: int) -> bytes:
        """Return `size` bytes from byte `at` on.

        Raises:
            UserError: if they cannot be read, or the file is no longer what it was.
        """


class LocalBytes:
    """A file on a disk. It uses no memory map, so a truncated file is an error.

    It is kept open: a file that is replaced meanwhile is still the old one.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._file = open_plain(path)  # as long as the dataset
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, at: int, size: int) -> bytes:
        """Return `size` bytes from byte `at` on.

        Raises:
            UserError: if the file has another size than when it was opened.
        """
        found = os.fstat(self._file.fileno()).st_size
        if found != self.size:
            raise UserError(f"data: {self.name} had {self.size} bytes and now has {found}; {REMEDY}")
        return os.pread(self._file.fileno(), size, at)


def open_bytes(path: Path) -> ByteFile:
    """Open a file, or the one in object storage for which a stub stands here.

    Raises:
        UserError: if it cannot be read.
    """
    try:
        return LocalBytes(path)
    except FileNotFoundError as error:
        stub = Stub.load(path)
        if stub is None:
            raise UserError(f"data file {str(path)!r} cannot be read: {error.strerror}") from None
        return StoredBytes(path, stub)
    except (OSError, ValueError) as error:
        raise UserError(f"data file {str(path)!r} cannot be read: {reason(error)}") from None


def is_stored(path: Path) -> bool:
    """Return whether a file is in object storage, and a stub stands for it here."""
    return not path.exists() and Stub.load(path) is not None


def size_of(path: Path) -> int | None:
    """Return a file's size in bytes, wherever it is; None if there is none."""
    if path.is_file():
        return path.stat().st_size
    stub = Stub.load(path)
    return None if stub is None else stub.size
