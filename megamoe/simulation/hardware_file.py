"""GPUs by name, or by a user's file of their peak rates."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from megamoe.costs.gpus import GPUS, Gpu
from megamoe.errors import UserError
from megamoe.plain_files import read_plain, reason

MOST_BYTES = 1 << 16
NUMBERS = [field.name for field in fields(Gpu) if field.name != "name"]


def gpu_of(name: str) -> Gpu:
    """Return the GPU of the table, or of a JSON file with the fields of `Gpu`, in FLOP/s, bytes/s and bytes.

    Raises:
        UserError: if there is neither, or the file lacks a field or has another one.
    """
    if name in GPUS:
        return GPUS[name]
    try:
        found: Any = json.loads(read_plain(Path(name), MOST_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"--gpu: found {name!r}, expected one of {', '.join(GPUS)}, or a JSON file: {reason(error)}"
        ) from None
    expected = f"expected name and, as numbers above 0, {', '.join(NUMBERS)}"
    if not isinstance(found, dict):
        raise UserError(f"--gpu: {name}: {expected}")
    for key in sorted(found.keys() ^ {"name", *NUMBERS}):
        raise UserError(f"--gpu: {name}: {key} is {'not a key' if key in found else 'missing'}; {expected}")
    for key in NUMBERS:
        value = found[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise UserError(f"--gpu: {name}: {key}: found {value!r}, {expected}")
    return Gpu(str(found["name"]), **{key: float(found[key]) for key in NUMBERS})
