"""Safetensors files of a folder, read by the library tensor by tensor."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megamoe.apps.checkpoints.stream import Stored
from megamoe.checkpoint.format.reader import IN_SAFETENSORS
from megamoe.errors import UserError, printable
from megamoe.io import reason

Shape = tuple[int, ...]
DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for name, code in IN_SAFETENSORS.items()}
DTYPES["F8_E4M3"] = torch.float8_e4m3fn


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file, whose header the library checks; what is wrong with it is a UserError."""
    try:
        if not path.is_file():
            raise ValueError("missing, or not a plain file")
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (OSError, ValueError, SafetensorError) as error:
        raise broken(path, reason(error)) from None


def read_header(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file by name, from its header alone.

    Raises:
        UserError: if it is no such file, cut short, or has an unknown dtype.
    """
    found = {}
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118 (it is no dictionary)
            about = file.get_slice(name)
            if about.get_dtype() not in DTYPES:
                known = ", ".join(DTYPES)
                raise ValueError(f"{name} has dtype {about.get_dtype()}, expected one of {known}")
            found[name] = Stored(DTYPES[about.get_dtype()], tuple(about.get_shape()))
    return found


def broken(path: Path, problem: object) -> UserError:
    """Return the error for a file of a folder that cannot be used."""
    return UserError(f"{path}: missing or damaged ({printable(problem)}); download the folder again")


def read_tensor(path: Path, name: str) -> Tensor:
    """Return a tensor of a file; raise UserError if it no longer holds it."""
    with _opened(path) as file:
        return file.get_tensor(name)
