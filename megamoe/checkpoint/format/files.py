"""The files of a checkpoint: their names, and how they come whole onto the disk.

step_00000100/
    checkpoint.json            step, position in the data, layout, configuration: to be read
    index.json                 every tensor's shape and dtype, and which file holds which box of it
    shard_00000.safetensors    what a rank wrote
    SHA256SUMS                 of the above; `sha256sum --check SHA256SUMS`
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from megamoe.errors import UserError, printable

META = "checkpoint.json"
INDEX = "index.json"
SUMS = "SHA256SUMS"
FORMAT = 2
LARGEST_JSON = 1 << 30  # bytes; the index of thousands of ranks has some hundred million
DEEPEST = 50  # levels of JSON


def shard_file(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"shard_{rank:05d}.safetensors"


def read_bytes(path: Path) -> bytes:
    """Of a plain file: a link may lead anywhere, a pipe would keep the reader waiting, a device never ends.

    Raises:
        ValueError: if it is none, or larger than any checkpoint's.
        OSError: if it cannot be read.
    """
    if not is_plain(path):
        raise ValueError("not a plain file")
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > LARGEST_JSON:
            raise ValueError(f"larger than {LARGEST_JSON >> 20} MiB")
        return file.read()


def is_plain(path: Path) -> bool:
    """Whether it is a file, no link to one, folder, pipe or device.

    Raises:
        OSError: if it is not there, or cannot be asked.
    """
    return stat.S_ISREG(os.lstat(path).st_mode)


def read_json(path: Path) -> dict[str, Any]:
    """An object from a plain file; each key of an object stands there once.

    Raises:
        ValueError, OSError: if it is none, or cannot be read.
    """
    return parse_json(read_bytes(path))


def parse_json(text: bytes) -> dict[str, Any]:
    """An object. NaN and the infinities pass, as Python writes them: a configuration may hold such.

    Raises:
        ValueError: if it is none.
    """
    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        _check_depth(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("expected a JSON object")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name} stands there twice")
        found[name] = value
    return found


def _check_depth(content: Any, left: int = DEEPEST) -> None:
    if left == 0:
        raise RecursionError
    if isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            if isinstance(value, dict | list):
                _check_depth(value, left - 1)


def damaged(path: Path, problem: object) -> UserError:
    """What to raise of a checkpoint, or of its file, that cannot be used."""
    return UserError(f"{path}: missing or damaged ({printable(problem)}); name another checkpoint")


def sync(path: Path) -> None:
    """A file, or a folder's names, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Whole or not at all, and on the disk when this returns."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
