"""Reading documents: files, folders, globs and URLs of text, JSON lines and parquet; Python's library.

Text and JSON lines may end in .gz, .zst or .xz. Parquet is in `tables.py`. Endings are
compared without regard to case.

Design choices: the order is fixed (as given; sorted within a folder or glob); nothing is skipped
silently: unreadable text is a UserError with the file and the line, and what is left out is counted by its
reason; each file is read once, and hashed and counted meanwhile.
"""

import codecs
import glob
import hashlib
import io
import itertools
import string
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from megamoe.apps.prepare import remote
from megamoe.apps.prepare.decompression import decompressed
from megamoe.apps.prepare.documents import LARGEST_DOCUMENT, Document, Selection, Skipped, check_size
from megamoe.apps.prepare.tables import PARQUET, TableReader, row_groups
from megamoe.data.card import SourceCard
from megamoe.errors import UserError, listed
from megamoe.io import parse_json, real
from megamoe.object_storage import is_url, without_credentials

COMPRESSED = (".gz", ".zst", ".xz")
JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
# What a folder's files may be, and what else a file may be that is named itself.
OF_FOLDERS = (*JSON_LINES, ".json", PARQUET, ".txt", ".text")
OF_NAMES = (*OF_FOLDERS, ".md", "")
CHUNK_BYTES = 1 << 20
STDLIB, NAME_MARK = "stdlib", ":"  # a source of the standard library is named stdlib:json/decoder.py
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """One file of documents, or some row groups of one; `name` is how the data card and errors show it.

    path: of a local file; of a file behind a `url` only its name is used. groups: the first row group of a
    parquet file and the one after the last. extent: the bytes that they, or the remote file, have. state:
    of a remote file, what changes with its content.
    """

    name: str
    path: Path
    url: str = ""
    groups: tuple[int, int] | None = None
    extent: int | None = None
    state: str = ""

    @property
    def compression(self) -> str:
        """Return the ending of a compressed file in lower case, or an empty one."""
        ending = self.path.suffix.lower()
        return ending if ending in COMPRESSED else ""

    @property
    def kind(self) -> str:
        """Return the ending that says how it is read, in lower case, without that of a compression."""
        kind = (self.path.with_suffix("") if self.compression else self.path).suffix.lower()
        return ".jsonl" if kind in JSON_LINES else kind

    @property
    def location(self) -> str:
        return self.url or str(self.path)

    @property
    def size(self) -> int:
        """Return the number of bytes that are read of it, as far as is known before."""
        return self.path.stat().st_size if self.extent is None else self.extent

    def identity(self) -> list[Any]:
        """Return plain data that change when what is read changes."""
        if self.url:
            return [self.name, self.groups, self.extent, self.state]
        status = self.path.stat()
        return [str(real(self.path)), self.groups, status.st_size, status.st_mtime_ns]

    def open(self) -> IO[bytes] | io.RawIOBase:
        """Open the whole file for reading; raise a UserError if it cannot be opened."""
        try:
            return remote.RemoteFile(self.url) if self.url else open(self.path, "rb", buffering=0)
        except OSError as error:
            raise UserError(f"{self.name}: cannot be read: {error.strerror or error}") from error


class Tap:
    """A file that hashes and counts its bytes as they are read; `close` it at the end.

    `advance` is called with the size of each read.
    """

    def __init__(self, source: Source, advance: Callable[[int], Any] = lambda _: None) -> None:
        self._file: Any = source.open()
        self._source, self._advance = source, advance
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

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def lines(self) -> Iterator[str]:
        """Yield the lines, without their ends (LF, or CR LF).

        Raises:
            UserError: naming file and line, for text that is not UTF-8; naming the file, if it cannot be read
                or decompressed.
        """
        source = self._source
        with decompressed(self.chunks(), source.compression, source.name) as stream:
            for number, line in enumerate(_lines(source, stream), start=1):
                yield _decode(source, line, first_line=number).removesuffix("\n").removesuffix("\r")

    def card(self, documents: int) -> SourceCard:
        """Return what the data card says of the whole file; documents: their number."""
        digest = self.sha256()
        return SourceCard(self._source.name, self.num_bytes, digest, documents)


def find_sources(
    inputs: list[str], stdlib: bool, unit: int | None = None, other_files: str = "text"
) -> list[Source]:
    """Return the files that `inputs` (files, folders, globs, URLs) name, in order, then those of the standard
    library.

    unit: bytes; larger parquet files are divided into row groups of at least so many together. other_files:
    files with unknown endings are plain text, or an error (`refuse`).

    Raises:
        UserError: if an input does not exist, matches nothing, cannot be read, or names a file a second time;
            for files with unknown endings.
    """
    if not inputs and not stdlib:
        raise UserError("no input: name files, folders, globs or URLs of text, or --stdlib")
    sources: list[Source] = []
    for item in inputs:
        found = _behind_url(item) if is_url(item) else [Source(str(path), path) for path in _files_of(item)]
        if other_files == "refuse":
            _check_endings(item, found)
        sources += found
    if stdlib:
        sources += _standard_library()
    seen: set[str] = set()
    for source in sources:
        identity = source.url or str(real(source.path))
        if identity in seen:
            raise UserError(f"input {source.name!r} is given twice; name each file once")
        seen.add(identity)
    return [part for source in sources for part in _divided(source, unit)]


def _check_endings(item: str, sources: list[Source]) -> None:
    """Raise a UserError for unknown endings of an input's sources."""
    # A glob such as *.md names its files too.
    ending = Path(item).suffix
    is_named = not Path(item).is_dir() and not glob.has_magic(ending) and (ending or not glob.has_magic(item))
    known = OF_NAMES if is_named else OF_FOLDERS
    unknown = [source for source in sources if source.kind not in known]
    if unknown:
        names = listed([source.name for source in unknown])
        raise UserError(
            f"input {item!r}: {len(unknown)} files with unknown endings ({names}), expected "
            f"{', '.join(filter(None, known))}; name the wanted files by a glob, or add --other-files text"
        )


def _behind_url(item: str) -> list[Source]:
    found = []
    for url in remote.find(item):
        size, state = remote.state(url)
        name = without_credentials(url)
        found.append(Source(name, Path(name.rpartition("/")[2]), url, None, size, state))
    return found


def _divided(source: Source, unit: int | None) -> Iterator[Source]:
    """Yield a source, or a large parquet file by consecutive row groups of at least `unit` bytes together."""
    if source.kind != PARQUET:
        yield source
        return
    groups = row_groups(source.location, source.name)
    first, size, total = 0, 0, sum(groups)
    for number, more in enumerate(groups, start=1):
        size += more
        if number == len(groups) or (unit is not None and size >= unit):
            name = source.name if size == total else f"{source.name}[{first}:{number}]"
            yield Source(name, source.path, source.url, (first, number), size, source.state)
            first, size = number, 0


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
        raise UserError(f"input {item!r} holds no files; expected text, .jsonl or .parquet files")
    return sorted(found)


def _standard_library() -> list[Source]:
    """Return the .py files of the running Python's standard library, without its tests, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    library = [path for path in found if NOT_LIBRARY.isdisjoint(path.parts)]
    return [Source(f"{STDLIB}{NAME_MARK}{path.as_posix()}", root / path) for path in library]


def open_source(
    source: Source, selection: Selection, advance: Callable[[int], Any]
) -> "_FileReader | TableReader":
    """Open a source to read its documents, and then what the data card says of it; `advance` is called with
    the bytes that are read.

    Raises:
        UserError: if it cannot be opened, or if an option of the selection does not fit its kind.
    """
    if source.kind == PARQUET:
        of_source = (source.location, source.name, source.groups, source.size)
        return TableReader(*of_source, selection, advance)
    if selection.ids is not None and source.kind != ".jsonl":
        raise UserError(f"{source.name}: --ids-column is for parquet and JSON lines only")
    return _FileReader(source, advance, selection)


class _FileReader(Tap):
    """The documents of a file that is read from its start to its end."""

    def __init__(self, source: Source, advance: Callable[[int], Any], selection: Selection) -> None:
        super().__init__(source, advance)
        self._selection = selection

    def documents(self) -> Iterator[Document | Skipped]:
        """Yield each line's text of JSON lines, otherwise the whole text.

        A `.json` is JSON lines, as Megatron-LM's tools read them, if its first line is an object with the
        key.

        Raises:
            UserError: naming file and line, for text that is not UTF-8, a line that is not JSON, or a
                missing key; naming the file, if it cannot be read or decompressed.
        """
        source, selection = self._source, self._selection
        with decompressed(self.chunks(), source.compression, source.name) as stream:
            if source.kind == ".jsonl":
                yield from _read_json_lines(source, _lines(source, stream), selection)
            elif source.kind == ".json":
                lines = _lines(source, stream)
                if _holds(first := next(lines, b""), selection.column):
                    yield from _read_json_lines(source, itertools.chain([first], lines), selection)
                else:
                    yield _decode(source, first + _whole(stream, source.name), first_line=1)
            else:
                yield _decode(source, _whole(stream, source.name), first_line=1)


def _lines(source: Source, stream: IO[bytes]) -> Iterator[bytes]:
    for number, line in enumerate(iter(partial(stream.readline, LARGEST_DOCUMENT + 1), b""), start=1):
        check_size(len(line), f"{source.name}:{number}")
        yield line


def _whole(stream: IO[bytes], name: str) -> bytes:
    """Return what has not been read yet; raise a UserError if it is too large."""
    content = stream.read(LARGEST_DOCUMENT + 1)
    check_size(len(content), name)
    return content


def _holds(line: bytes, key: str) -> bool:
    """Whether a line is a JSON object that has the key."""
    try:
        record = parse_json(line)
    except ValueError:
        return False
    return isinstance(record, dict) and key in record


def _read_json_lines(
    source: Source, stream: Iterable[bytes], selection: Selection
) -> Iterator[Document | Skipped]:
    for number, line in enumerate(stream, start=1):
        if not line.strip(string.whitespace.encode()):
            continue
        try:
            text = _decode(source, line, first_line=number)
            if not text.strip(string.whitespace):
                continue
            document = _of_json(text, f"{source.name}:{number}", selection)
        except UserError as error:
            yield selection.bad_line(error)
        else:
            yield document


def _of_json(text: str, place: str, selection: Selection) -> Document | Skipped:
    """Return the document of a JSON object, or that it is null."""
    try:
        record = parse_json(text)
    except ValueError as error:
        raise UserError(f"{place}: not JSON: {error}; write an object a line") from error
    key, kind = selection.column, str if selection.ids is None else list
    if isinstance(record, dict) and record.get(key, "") is None:
        return Skipped("null")
    if not isinstance(record, dict) or not isinstance(record.get(key), kind):
        found = f"keys {listed(list(record))}" if isinstance(record, dict) else type(record).__name__
        what, option = ("text", "--key") if selection.ids is None else ("token ids", "--ids-column")
        raise UserError(f"{place}: no {what} under {key!r} (found {found}); give {option}")
    return selection.of_json(record[key], place)


def _decode(source: Source, data: bytes, first_line: int) -> str:
    """Return the text of a file from one of its lines on, without a byte order mark at the file's start."""
    data = data.removeprefix(codecs.BOM_UTF8) if first_line == 1 else data
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise UserError(f"{source.name}:{line}: not UTF-8 text: {error.reason}; convert the file") from error
