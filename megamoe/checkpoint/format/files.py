"""The files of a checkpoint: their names, and reading and writing them safely.

step_00000100/
    checkpoint.json            step, position in the data, layout, configuration
    index.json                 every tensor's shape and dtype, and which file holds which chunk of it
    shard_00000.safetensors    the tensors that a rank wrote
    SHA256SUMS                 checksums of the above; `sha256sum --check SHA256SUMS`
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
MAX_DEPTH = 50  # levels of JSON


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
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > LARGEST_JSON:
            raise ValueError(f"larger than {LARGEST_JSON >> 20} MiB")
        return file.read()


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
            raise ValueError(f"the key {name} appears twice")
        found[name] = value
    return found


def _check_depth(content: Any, left: int = MAX_DEPTH) -> None:
    if left == 0:
        raise RecursionError
    if isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            if isinstance(value, dict | list):
                _check_depth(value, left - 1)


def damaged(path: Path, problem: object) -> UserError:
    """Return the error to raise for a checkpoint, or a file of one, that cannot be used."""
    return UserError(f"{path}: missing or damaged ({printable(problem)}); name another checkpoint")


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, and flush it to the disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
