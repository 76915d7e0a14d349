"""Checksums of a checkpoint: a SHA-256 of every file, in the format that `sha256sum --check` reads.

The list needs no checksum of its own: a line that is changed, missing or added no longer fits the folder's
files. File names have no `..` and no path, and links are refused, so that nothing leads out of the
checkpoint's folder.
"""

import hashlib
import mmap
import os
import re
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

from megamoe.checkpoint.format.files import META, SUMS, is_plain, read_bytes, write_text
from megamoe.errors import printable

NAME = re.compile(r"[a-z0-9_]+\.(?:json|safetensors)")
LINE = re.compile(rf"([0-9a-f]{{64}})  ({NAME.pattern})")
SMALL = ".json"  # the files that every rank reads
BLOCK = 1 << 24  # bytes hashed at a time; other threads can run meanwhile


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
                for at in range(0, len(view), BLOCK):
                    digest.update(view[at : at + BLOCK])
    return digest.hexdigest()


def write_sums(folder: Path, sums: dict[str, str]) -> None:
    """Write SHA256SUMS; sums: the checksum of each file by its name."""
    write_text(folder / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))


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
        content = read_bytes(path).decode("ascii")
        names = [entry.name for entry in os.scandir(folder)]
    except (OSError, ValueError) as error:
        yield f"{SUMS}: missing or damaged ({_reason(error)})"
        return {}
    lines = content.split("\n")
    matches = [LINE.fullmatch(line) for line in lines[:-1]]
    if lines[-1] or not all(matches):
        yield f"{SUMS}: damaged, expected lines of a SHA-256 and a file's name"
        return {}
    sums = {match[2]: match[1] for match in matches if match}
    if list(sums) != sorted(sums) or len(sums) < len(matches) or META not in sums:
        yield f"{SUMS}: damaged, expected each file once, in order"
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


def _check_file(path: Path, expected: str) -> Iterator[str]:
    try:
        with suppress(FileNotFoundError):  # already reported
            if is_plain(path) and sha256(path) != expected:
                yield f"{path.name}: damaged, its SHA-256 is not the one in {SUMS}"
    except OSError as error:
        yield f"{path.name}: cannot be read ({_reason(error)})"


def _reason(error: Exception) -> str:
    return printable((isinstance(error, OSError) and error.strerror) or error)
