"""Safetensors files read and written tensor by tensor, without mapping them into memory.

A file is the length of its header (8 bytes, little endian), the header (JSON: dtype, shape and place of each
tensor), and the tensors one after the other. Source:
https://huggingface.co/docs/safetensors/index#format
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megamoe.checkpoint.format.files import parse_json
from megamoe.errors import UserError, printable
from megamoe.io import open_plain, reason

Shape = tuple[int, ...]
LARGEST_HEADER = 100_000_000  # bytes; the bound of the safetensors library
LENGTH_BYTES = 8
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: its dtype and shape, and where its bytes begin in the file."""

    dtype: torch.dtype
    shape: Shape
    start: int = 0

    @property
    def num_bytes(self) -> int:
        """The number of its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file by name, from its header alone.

    Raises:
        UserError: if it is no such file: cut short, with a gap, an overlap, or an unknown dtype.
    """
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if not 0 < length <= min(LARGEST_HEADER, size - LENGTH_BYTES):
                raise ValueError("no header of a safetensors file")
            header = parse_json(file.read(length))
        return _checked(header, LENGTH_BYTES + length, size)
    except (OSError, ValueError) as error:
        raise broken(path, reason(error)) from None


def broken(path: Path, problem: object) -> UserError:
    """Return the error for a file of a folder that cannot be used."""
    return UserError(f"{path}: missing or damaged ({printable(problem)}); download the folder again")


def _checked(header: dict[str, Any], start: int, size: int) -> dict[str, Stored]:
    """Return the tensors of a header, whose bytes fill the file from `start` on."""
    found = {name: _stored(name, about, start) for name, about in header.items() if name != "__metadata__"}
    at = start
    for name, stored in sorted(found.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if stored.start != at:
            raise ValueError(f"the bytes of {name} begin at {stored.start}, expected {at}")
        at += stored.num_bytes
    if at != size:
        raise ValueError(f"{size:,} bytes, its header names {at:,}")
    return found


def _stored(name: str, about: Any, start: int) -> Stored:
    if not isinstance(about, dict) or about.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the header of {name} is not one of a tensor")
    shape, offsets = about["shape"], about["data_offsets"]
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers) or len(offsets) != 2:
        raise ValueError(f"{name} has no shape and place in whole numbers")
    if about["dtype"] not in DTYPES:
        raise ValueError(f"{name} has dtype {about['dtype']}, expected one of {', '.join(DTYPES)}")
    stored = Stored(DTYPES[about["dtype"]], tuple(shape), start + offsets[0])
    if stored.num_bytes != offsets[1] - offsets[0]:
        raise ValueError(f"{name} has {offsets[1] - offsets[0]} bytes for shape {shape} of {about['dtype']}")
    return stored


def read_tensor(path: Path, stored: Stored) -> Tensor:
    """Return a tensor of a file, in memory of its own.

    Raises:
        UserError: if the file no longer holds it.
    """
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    if not stored.num_bytes:
        return tensor
    try:
        with open_plain(path) as file:
            file.seek(stored.start)
            memory = tensor.view(-1).view(torch.uint8).numpy().data
            if file.readinto(memory) < len(memory):  # type: ignore[attr-defined]
                raise ValueError("it ends early")
    except (OSError, ValueError) as error:
        raise broken(path, reason(error)) from None
    return tensor


class TensorWriter:
    """Writes the tensors of one safetensors file in any order; their dtypes and shapes are known before.

    metadata: text for other programs. Used in a `with` block, at whose end every tensor must be written.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, Stored], metadata: Mapping[str, str] | None = None
    ) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        places, at = {}, 0
        # The largest items first, so that each tensor is aligned, as the safetensors library has it.
        for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
            stored = tensors[name]
            places[name] = at
            end = at + stored.num_bytes
            header[name] = {
                "dtype": NAMES[stored.dtype],
                "shape": list(stored.shape),
                "data_offsets": [at, end],
            }
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % LENGTH_BYTES)
        start = LENGTH_BYTES + len(text)
        self._tensors, self._starts = dict(tensors), {name: start + place for name, place in places.items()}
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        self._file.truncate(start + at)

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, *unused: BaseException | TracebackType | None
    ) -> None:
        if kind is None:
            assert not self._tensors, f"not written: {sorted(self._tensors)[:3]}"
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor of the dtype and the shape that were announced for this name, once."""
        stored = self._tensors.pop(name)
        assert (tensor.dtype, tuple(tensor.shape)) == (stored.dtype, stored.shape), name
        if stored.num_bytes:
            self._file.seek(self._starts[name])
            self._file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
