"""The files of a checkpoint: names, safe reading and writing, a SHA-256 of each for `sha256sum --check`."""

import hashlib
import mmap
import os
import re
import stat
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from megamoe import io
from megamoe.errors import UserError, printable
from megamoe.io import reason, replace_file

META = "checkpoint.json"
INDEX = "index.json"
SUMS = "SHA256SUMS"
FORMAT = 2
LARGEST_JSON = 1 << 30  # bytes; the index of thousands of ranks has some hundred million


def shard_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"shard_{rank:05d}.safetensors"


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file of a checkpoint.

    Anything else is refused: a link may lead anywhere, a pipe would block the reader, a device never ends.

    Raises:
        ValueError: if it is not a regular file, or larger than LARGEST_JSON.
        OSError: if it cannot be read.
    """
    if not is_plain(path):
        raise ValueError("not a plain file")
    return io.read_plain(path, LARGEST_JSON)


def is_plain(path: Path) -> bool:
    """Return whether it is a regular file, not a link, folder, pipe or device.

    Raises:
        OSError: if it is missing, or its status cannot be read.
    """
    return stat.S_ISREG(os.lstat(path).st_mode)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object that a regular file holds. No object in it has a key twice.

    Raises:
        ValueError: if the content is not such an object, or the file is not a regular one.
        OSError: if the file cannot be read.
    """
    return parse_json(read_bytes(path))


def parse_json(text: bytes) -> dict[str, Any]:
    """Return the JSON object that the text is. NaN and infinities are accepted: a configuration may have
    them.

    Raises:
        ValueError: if the text is not a JSON object, is nested too deeply, or has a key twice.
    """
    content = io.parse_json(text.decode("utf-8"), unique=True)
    if not isinstance(content, dict):
        raise ValueError("expected a JSON object")
    return content


def damaged(path: Path, problem: object) -> UserError:
    """Return the error to raise for a checkpoint, or a file of one, that cannot be used."""
    return UserError(f"{path}: missing or damaged ({printable(problem)}); name another checkpoint")


NAME = re.compile(r"[a-z0-9_]+\.(?:json|safetensors)")
LINE = re.compile(rf"([0-9a-f]{{64}})  ({NAME.pattern})")
SMALL = ".json"  # the files that every rank reads
BLOCK = 1 << 24  # bytes hashed at a time; other threads can run meanwhile


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with io.open_plain(path) as file:
        if os.fstat(file.fileno()).st_size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
                for at in range(0, len(view), BLOCK):
                    digest.update(view[at : at + BLOCK])
    return digest.hexdigest()


def write_sums(folder: Path, sums: dict[str, str]) -> None:
    """Write SHA256SUMS; sums: the checksum of each file by its name."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    replace_file(folder / SUMS, lines.encode(), synced=True)


def problems(folder: Path, share: int = 0, shares: int = 1) -> Iterator[str]:
    """Yield a message for each thing that is wrong with the checkpoint; none if it is as it was saved.

    Of the tensor files only number `share`, `share` + `shares`, ... of the list are read, so that ranks can
    divide them; with 0 shares none is. The other files are read whatever the share.
    """
    sums = yield from _listed(folder)
    tensors = [name for name in sums if not name.endswith(SMALL)]
    for name in [name for name in sums if name.endswith(SMALL)] + (tensors[share::shares] if shares else []):
        yield from _check_file(folder / name, sums[name])


def _listed(folder: Path) -> Generator[str, None, dict[str, str]]:
    """Yield problems; return the checksums by file name, none if the list cannot be read."""
    path = folder / SUMS
    try:
        content = read_bytes(path)
        names = [entry.name for entry in os.scandir(folder)]
    except (OSError, ValueError) as error:
        yield f"{SUMS}: missing or damaged ({printable(reason(error))})"
        return {}
    try:
        sums = parse_sums(content)
    except ValueError as error:
        yield f"{SUMS}: {error}"
        return {}
    # NFS gives a deleted file that is still open such a name.
    found = sorted(name for name in names if name != SUMS and not name.startswith(".nfs"))
    for name in found:
        if name not in sums:
            yield f"{printable(name)}: not in {SUMS}"
    for name in sums:
        if name not in found:
            yield f"{name}: missing"
        elif not is_plain(folder / name):
            yield f"{name}: not a plain file"
    return sums


def parse_sums(content: bytes) -> dict[str, str]:
    """Return the checksums that SHA256SUMS lists, by file name.

    Raises:
        ValueError: if it is not such a list, each file once, in order.
    """
    lines = content.decode("ascii", "replace").split("\n")
    matches = [LINE.fullmatch(line) for line in lines[:-1]]
    if lines[-1] or not all(matches):
        raise ValueError("damaged, expected lines of a SHA-256 and a file's name")
    sums = {match[2]: match[1] for match in matches if match}
    if list(sums) != sorted(sums) or len(sums) < len(matches) or META not in sums:
        raise ValueError("damaged, expected each file once, in order")
    return sums


def _check_file(path: Path, expected: str) -> Iterator[str]:
    try:
        with suppress(FileNotFoundError):  # already reported
            if is_plain(path) and sha256(path) != expected:
                yield f"{path.name}: damaged, its SHA-256 is not the one in {SUMS}"
    except OSError as error:
        yield f"{path.name}: cannot be read ({printable(reason(error))})"
