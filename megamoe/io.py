"""Reads files named by a user: plain files only, of bounded size, JSON of bounded depth; replaces files.

A pipe would block the reader, a device such as /dev/zero never ends, and deep JSON exceeds Python's stack.
"""

import errno
import itertools
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

# Files of a run, in its folder.
METRICS_FILE, CONFIG_FILE, SUMMARY_FILE = "metrics.jsonl", "config.yaml", "summary.json"
TEMPORARY = ".tmp"  # the end of the name of a file that is not in place yet
DEEPEST = 100  # levels of objects and lists in JSON


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
        content = file.read(size + 1) if size <= largest else b""
        while size <= largest >= len(content) and (more := file.read(1 << 16)):
            content += more
    if max(size, len(content)) > largest:
        raise ValueError(f"larger than {largest:,} bytes")
    return content


def read_json(path: Path, largest: int, *, unique: bool = False) -> Any:
    """Return what the JSON in a plain file says; raises what `read_plain` and `parse_json` do."""
    return parse_json(read_plain(path, largest), unique=unique)


def parse_json(text: str | bytes, *, unique: bool = False) -> Any:
    """Return what JSON text says, NaN and infinities too. unique: no object may have a key twice.

    Raises:
        ValueError: if it is no JSON, or has more than DEEPEST levels.
    """
    too_deep = ValueError(f"nested too deeply: more than {DEEPEST} levels")
    try:
        content = json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise too_deep from None
    level = [content]
    for _ in range(DEEPEST + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return content
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    raise too_deep


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {max(names, key=names.count)!r} stands twice")
    return content


def real(path: Path) -> Path:
    """Return the path without links; in a loop of links, where `Path.resolve` raises, as far as they lead."""
    return Path(os.path.realpath(path))


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


def unused_name(path: Path) -> Path:
    """Return the name under which what is at `path` is kept: `run.before-1`, or with the next free number."""
    names = (path.with_name(f"{path.name}.before-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


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
    """Return in a few words what a reader of this file, or pydantic of what it has read, raised."""
    if callable(errors := getattr(error, "errors", None)):  # without an import of pydantic, which takes 0.1 s
        first = errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'file'}: {first['msg']}"
    return str((isinstance(error, OSError) and error.strerror) or error)
