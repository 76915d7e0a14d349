"""Streams of compressed files, in bounded memory; a file that ends early or is damaged is an error."""

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import zstandard

from megamoe.errors import UserError

BUFFER_BYTES = 1 << 20
PIECE_BYTES = 1 << 10  # that are decompressed at a time, at most to 32 MiB
XZ_BYTES = 1 << 30  # of memory that its decoder may take
BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)


@contextmanager
def decompressed(chunks: Iterator[bytes], compression: str, name: str) -> Iterator[IO[bytes]]:
    """Yield the stream of the chunks, decompressed: `.gz`, `.zst` or `.xz`, otherwise as they are.

    Raises:
        UserError: if the file cannot be read or decompressed inside the block.
    """
    if compression == ".zst":
        chunks = _unpacked(chunks, lambda: zstandard.ZstdDecompressor().decompressobj())
    elif compression == ".xz":
        chunks = _unpacked(chunks, lambda: lzma.LZMADecompressor(memlimit=XZ_BYTES), padding=b"\0")
    stream: IO[bytes] = io.BufferedReader(_Chunks(chunks), BUFFER_BYTES)
    if compression == ".gz":
        stream = io.BufferedReader(gzip.GzipFile(fileobj=stream), BUFFER_BYTES)
    try:
        yield stream
    except BROKEN as error:
        raise UserError(f"{name}: cannot be read: {error}; expected a complete file") from error


class _Chunks(io.RawIOBase):
    """A file of chunks of bytes, none of which is empty."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._pending = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._pending = self._pending or next(self._chunks, b"")
        count = min(len(buffer), len(self._pending))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count


def _unpacked(chunks: Iterator[bytes], new: Callable[[], Any], padding: bytes = b"") -> Iterator[bytes]:
    """Decompress the frames of zstd, or the streams of xz, by a `new` decoder each.

    Unlike the libraries' readers this detects a truncated file, and a damaged second stream.
    """
    decoder = None
    for chunk in chunks:
        for first in range(0, len(chunk), PIECE_BYTES):
            data = chunk[first : first + PIECE_BYTES]
            while data := data if decoder else data.lstrip(padding):
                decoder = decoder or new()
                if unpacked := decoder.decompress(data):
                    yield unpacked
                data = b""
                if decoder.eof:
                    data, decoder = decoder.unused_data, None
    if decoder is not None:
        raise EOFError("the compressed file ends before its end marker")
