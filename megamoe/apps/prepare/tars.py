"""The files in a tar, one after the other: `tarfile`, with limits and with a check of the end."""

import os
import tarfile
from collections.abc import Iterator
from typing import IO, Any, cast

from megamoe.apps.prepare.documents import check_size
from megamoe.errors import UserError, printable

# What tarfile raises for damaged headers; it recurses over those of long names and attributes.
BROKEN_TAR = (tarfile.TarError, ValueError, ArithmeticError, LookupError, RecursionError, MemoryError)
LONG_HEADERS, LARGEST_HEADER = (b"L", b"K", b"x", b"g", b"X"), 1 << 20  # the types of such members; bytes
CHUNK_BYTES = 1 << 20


def members_of(name: str, stream: IO[bytes], wanted: str) -> Iterator[tuple[str, bytes | None]]:
    """Yield the name of each file in a tar, and its content if it has the wanted ending.

    Raises:
        UserError: if the tar is damaged, or such a file is sparse or too large.
    """
    tail = _Tail(stream)
    try:
        with tarfile.open(fileobj=cast(Any, tail), mode="r|", tarinfo=_Member) as tar:
            while (member := tar.next()) is not None:
                cast(Any, tar).members.clear()  # which would grow with the file
                _, point, ending = os.path.basename(member.name).partition(".")
                content = None
                if member.isfile() and point + ending == wanted:
                    place = f"{name}:{printable(member.name)}"
                    if member.issparse():
                        raise UserError(f"{place}: a sparse file; pack it without --sparse")
                    check_size(member.size, place)
                    content = cast(IO[bytes], tar.extractfile(member)).read()
                if member.isfile():
                    yield member.name, content
            tail.check(cast(Any, tar).offset)
    except UserError:
        raise
    except BROKEN_TAR as error:
        problem = printable(error) or type(error).__name__
        raise UserError(f"{name}: cannot be read: {problem}; expected a complete tar") from error


class _Member(tarfile.TarInfo):
    """A header, of which `tarfile` would read names and attributes of any length into memory."""

    @classmethod
    def frombuf(cls, *arguments: Any, **options: Any) -> "_Member":
        member = super().frombuf(*arguments, **options)
        if member.type in LONG_HEADERS and member.size > LARGEST_HEADER:
            raise OverflowError(f"a header of {member.size:,} bytes")
        return member


class _Tail:
    """A stream whose end is checked: `tarfile` takes a tar that ends between two files for a whole one, and a
    damaged header for the end.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._size = self._content = 0  # bytes that were read, and those before the zeros at their end

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        if content := len(data.rstrip(b"\0")):
            self._content = self._size + content
        self._size += len(data)
        return data

    def check(self, end: int) -> None:
        """Read the rest; raise an EOFError unless there are zeros alone from `end` on, a block at least."""
        while self.read(CHUNK_BYTES):
            pass
        if self._size < end + tarfile.BLOCKSIZE:
            raise EOFError("the tar ends before its end marker")
        if self._content > end:
            raise EOFError(f"no header at byte {end:,}")
