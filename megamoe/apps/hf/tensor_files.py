"""Safetensors files tensor by tensor: read by the library, and written without all of a file in memory."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megamoe.checkpoint.format.reader import IN_SAFETENSORS
from megamoe.errors import UserError, printable
from megamoe.io import reason

Shape = tuple[int, ...]
LENGTH_BYTES = 8
NAMES = {getattr(torch, name): code for name, code in IN_SAFETENSORS.items()}
NAMES[torch.float8_e4m3fn] = "F8_E4M3"
DTYPES = {code: dtype for dtype, code in NAMES.items()}


@dataclass(frozen=True)
class Stored:
    """The dtype and shape of a tensor of a file."""

    dtype: torch.dtype
    shape: Shape

    @property
    def num_bytes(self) -> int:
        """The number of its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


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
        tensor: Tensor = file.get_tensor(name)
    return tensor


@contextmanager
def tensor_writer(
    path: Path, tensors: Mapping[str, Stored], metadata: Mapping[str, str] | None = None
) -> Iterator[Callable[[str, Tensor], None]]:
    """Write the tensors of one safetensors file, whose dtypes and shapes are known before, in any order.

    The function that it gives writes a tensor by its name; at the end every tensor must be written. metadata:
    text for other programs. A file is the length of its header (8 bytes, little endian), the header (JSON:
    dtype, shape and place of each tensor), and the tensors one after the other. Source:
    https://huggingface.co/docs/safetensors/index#format
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    left, at = dict(tensors), 0
    # The largest items first, so that each tensor is aligned, as the safetensors library has it.
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        place = [at, at := at + tensors[name].num_bytes]
        about = {"dtype": NAMES[tensors[name].dtype], "shape": list(tensors[name].shape)}
        header[name] = {**about, "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    start = LENGTH_BYTES + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        file.truncate(start + at)

        def write(name: str, tensor: Tensor) -> None:
            stored = left.pop(name)
            assert (tensor.dtype, tuple(tensor.shape)) == (stored.dtype, stored.shape), name
            if stored.num_bytes:
                file.seek(start + header[name]["data_offsets"][0])
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)

        yield write
        assert not left, f"not written: {sorted(left)[:3]}"
        file.flush()
        os.fsync(file.fileno())
