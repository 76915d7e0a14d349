"""The files of a checkpoint: their names, and how they come whole onto the disk.

step_00000100/
    checkpoint.json            step, position in the data, layout, configuration: to be read
    index.json                 every tensor's shape and dtype, and which file holds which box of it
    shard_00000.safetensors    what a rank wrote
    SHA256SUMS                 of the above; `sha256sum --check SHA256SUMS`
"""

import json
import os
from pathlib import Path
from typing import Any

from megamoe.errors import UserError

META = "checkpoint.json"
INDEX = "index.json"
SUMS = "SHA256SUMS"
FORMAT = 2


def shard_file(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"shard_{rank:05d}.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file.

    Raises:
        ValueError, OSError: if it is none, or cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("expected a JSON object")
    return content


def damaged(path: Path, problem: object) -> UserError:
    """What to raise of a checkpoint, or of its file, that cannot be used."""
    return UserError(f"{path}: missing or damaged ({problem}); name another checkpoint")


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
