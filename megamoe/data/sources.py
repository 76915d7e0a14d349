"""Reading text: files, folders, globs, JSON lines (also .gz and .zst), Python's standard library.

Design choices: the order is fixed (as given; sorted within a folder or glob); nothing is skipped
silently: unreadable text is a UserError with the file and the line; each file is read once, and hashed and
counted meanwhile.
"""

import glob
import gzip
import hashlib
import io
import json
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zstandard

from megamoe.errors import UserError

COMPRESSED = (".gz", ".zst")
CHUNK_BYTES = 1 << 20
STDLIB, NAME_MARK = "stdlib", ":"  # a source of the standard library is named stdlib:json/decoder.py
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """One file of text; `name` is how it is shown in the data card and in errors."""

    name: str
    path: Path

    @property
    def is_json_lines(self) -> bool:
        plain = self.path.with_suffix("") if self.path.suffix in COMPRESSED else self.path
        return plain.suffix == ".jsonl"


class Tap(AbstractContextManager["Tap"]):
    """A file that hashes and counts its bytes as they are read. Usable as a context manager.

    `advance` is called with the size of each read.
    """

    def __init__(self, source: Source, advance: Callable[[int], Any]) -> None:
        self._file = open(source.path, "rb", buffering=0)  # noqa: SIM115 (closed by __exit__)
        self._advance = advance
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    def chunks(self) -> Iterator[bytes]:
        """Yield what has not been read yet."""
        while chunk := self._file.read(CHUNK_BYTES):
            self._digest.update(chunk)
            self.num_bytes += len(chunk)
            self._advance(len(chunk))
            yield chunk

    def sha256(self) -> str:
        """Return the SHA-256 of the whole file; read what has not been read yet."""
        for _ in self.chunks():
            pass
        return self._digest.hexdigest()

    def __exit__(self, *_: object) -> None:
        self._file.close()


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


def _decompressed_zstd(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Decompress zstd frames. Unlike the library's reader this detects a truncated file."""
    frame = None
    for data in chunks:
        while data:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            if found := frame.decompress(data):
                yield found
            data = b""
            if frame.eof:
                data, frame = frame.unused_data, None
    if frame is not None:
        raise EOFError("the compressed file ends before its end marker")


def find_sources(inputs: list[str], stdlib: bool) -> list[Source]:
    """Return the files that `inputs` (files, folders, globs) name, in order, then those of the standard
    library.

    Raises:
        UserError: if an input does not exist, matches nothing, or names a file a second time.
    """
    if not inputs and not stdlib:
        raise UserError("no input: name files, folders or globs of text, or --stdlib")
    sources = [Source(str(path), path) for item in inputs for path in _files_of(item)]
    if stdlib:
        sources += _standard_library()
    seen: set[Path] = set()
    for source in sources:
        resolved = source.path.resolve()
        if resolved in seen:
            raise UserError(f"input {source.name!r} is given twice; name each file once")
        seen.add(resolved)
    return sources


def _files_of(item: str) -> list[Path]:
    path = Path(item)
    if path.is_file():
        return [path]
    if path.is_dir():
        files = (file for file in path.rglob("*") if file.is_file())
        found = [file for file in files if not any(p.startswith(".") for p in file.relative_to(path).parts)]
    elif glob.has_magic(item):
        found = [Path(file) for file in glob.glob(item, recursive=True) if Path(file).is_file()]
    else:
        raise UserError(f"input {item!r} does not exist; expected a file, a folder or a glob")
    if not found:
        raise UserError(f"input {item!r} holds no files; expected text or .jsonl files")
    return sorted(found)


def _standard_library() -> list[Source]:
    """Return the .py files of the running Python's standard library, without its tests, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    library = [path for path in found if NOT_LIBRARY.isdisjoint(path.parts)]
    return [Source(f"{STDLIB}{NAME_MARK}{path.as_posix()}", root / path) for path in library]


def read_documents(source: Source, tap: Tap, key: str) -> Iterator[str]:
    """Yield the documents of one file: each line's `key` of JSON lines, otherwise the whole text.

    An empty document is an empty string, which the caller counts.

    Raises:
        UserError: naming file and line, for text that is not UTF-8, a line that is not JSON, or a
            missing key; naming the file, if it cannot be read or decompressed.
    """
    with _decompressed(source, tap) as stream:
        if source.is_json_lines:
            yield from _read_json_lines(source, stream, key)
        else:
            yield _decode(source, stream.read(), first_line=1)


def read_lines(source: Source, tap: Tap) -> Iterator[str]:
    """Yield the lines of one file, without their ends (LF, or CR LF).

    Raises:
        UserError: naming file and line, for text that is not UTF-8; naming the file, if it cannot be read or
            decompressed.
    """
    with _decompressed(source, tap) as stream:
        for number, line in enumerate(stream, start=1):
            yield _decode(source, line, first_line=number).removesuffix("\n").removesuffix("\r")


@contextmanager
def _decompressed(source: Source, tap: Tap) -> Iterator[IO[bytes]]:
    """Raise a UserError if the file cannot be read or decompressed inside the block."""
    chunks = tap.chunks()
    if source.path.suffix == ".zst":
        chunks = _decompressed_zstd(chunks)
    stream: IO[bytes] = io.BufferedReader(_Chunks(chunks), CHUNK_BYTES)
    if source.path.suffix == ".gz":
        stream = io.BufferedReader(gzip.GzipFile(fileobj=stream), CHUNK_BYTES)
    try:
        yield stream
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"{source.name}: cannot be read: {error}; expected a complete file") from error


def _read_json_lines(source: Source, stream: IO[bytes], key: str) -> Iterator[str]:
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        text = _decode(source, line, first_line=number)
        try:
            record = json.loads(text)
        except ValueError as error:
            raise UserError(f"{source.name}:{number}: not JSON: {error}; write an object a line") from error
        if not isinstance(record, dict) or not isinstance(record.get(key), str):
            found = f"keys {', '.join(record)}" if isinstance(record, dict) else type(record).__name__
            raise UserError(f"{source.name}:{number}: no text under {key!r} (found {found}); give --key")
        document: str = record[key]
        try:
            document.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"{source.name}:{number}: half a surrogate pair in {key!r}: {error}") from error
        yield document


def _decode(source: Source, data: bytes, first_line: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise UserError(f"{source.name}:{line}: not UTF-8 text: {error.reason}; convert the file") from error
