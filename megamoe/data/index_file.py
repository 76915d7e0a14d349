"""The `.idx` file of Megatron-Core's indexed datasets: reading and checking it.

Layout, little-endian: 9 bytes magic, uint64 version, uint8 dtype code, uint64 number of sequences n, uint64
number of document boundaries m; int32 lengths [n] in tokens, int64 pointers [n] in bytes into the .bin, int64
document boundaries [m] in sequences. Source: `megatron/core/datasets/indexed_dataset.py`, `_IndexWriter`.

The memory that is used here does not grow with the file, or with a number in it.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megamoe.errors import UserError
from megamoe.io import open_plain, reason

HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
# Megatron-Core's codes of the dtypes that can hold token ids.
TOKEN_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
MOST_SEQUENCES = 2**31 - 1  # Megatron-Core numbers them in int32
CHUNK = 1 << 18  # sequences that are checked at a time
REMEDY = "put the right file back or prepare the data again"


@dataclass
class IndexHeader:
    """The header; the bytes of a token; and the offsets in the file that follow from it, in bytes."""

    dtype: str
    num_sequences: int
    num_boundaries: int

    def __post_init__(self) -> None:
        self.token_bytes = np.dtype(self.dtype).itemsize
        self.pointers_at = HEADER.size + 4 * self.num_sequences
        self.boundaries_at = self.pointers_at + 8 * self.num_sequences
        self.file_size = self.boundaries_at + 8 * self.num_boundaries


def read_header(idx: Path) -> tuple[IndexHeader, int]:
    """Return the header, and the .bin's size by the last length and pointer. Reads a few bytes.

    Raises:
        UserError: if the file cannot be read, is not an index, or has another size than its header implies.
    """
    broken = f"data index {str(idx)!r} is"
    try:
        with open_plain(idx) as file:
            content = file.read(HEADER.size)
            if len(content) < HEADER.size:
                raise UserError(f"{broken} truncated: {len(content)} bytes; {REMEDY}")
            magic, version, code, num_sequences, num_boundaries = HEADER.unpack(content)
            if magic != MAGIC or version != VERSION or code not in TOKEN_DTYPES:
                raise UserError(f"{broken} no Megatron-Core index (version 1) of token ids; {REMEDY}")
            header = IndexHeader(TOKEN_DTYPES[code], num_sequences, num_boundaries)
            size = os.fstat(file.fileno()).st_size
            if size != header.file_size:
                what = "truncated" if size < header.file_size else "too long"
                raise UserError(f"{broken} {what}: {size} bytes, expected {header.file_size}; {REMEDY}")
            if num_sequences == 0 or num_boundaries == 0:
                raise UserError(f"{broken} empty: it lists no document; {REMEDY}")
            if num_sequences > MOST_SEQUENCES:
                raise UserError(f"{broken} too long: {num_sequences} sequences, expected at most 2^31 - 1")
            file.seek(header.pointers_at - 4)
            last_length = int.from_bytes(file.read(4), "little")
            file.seek(header.boundaries_at - 8)
            last_pointer = int.from_bytes(file.read(8), "little")
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{broken} not readable: {reason(error)}") from error
    return header, last_pointer + last_length * header.token_bytes


def tokens_before(idx: Path, sequence: int) -> int:
    """Return the tokens before a sequence; of the number of sequences: all tokens. Reads a few bytes."""
    header, end = read_header(idx)
    if sequence == header.num_sequences:
        return end // header.token_bytes
    with open_plain(idx) as file:
        file.seek(header.pointers_at + 8 * sequence)
        return int.from_bytes(file.read(8), "little") // header.token_bytes


def check_arithmetic(idx: Path, bin_size: int) -> tuple[IndexHeader, int]:
    """Check that an index is consistent; return its header and number of tokens.

    Lengths are 0 or more, each pointer is the sum of the lengths before it times the bytes of a token, the
    last sequence ends where the .bin ends, and the document boundaries ascend from 0 to the number of
    sequences.

    Args:
        bin_size: the size of the .bin in bytes.

    Raises:
        UserError: with the file, the first wrong entry, and what was expected.
    """
    header, _ = read_header(idx)
    broken = f"data index {str(idx)!r} is damaged:"
    _check_boundaries(idx, header, broken)
    end = _check_sequences(idx, header, bin_size, broken)
    if end != bin_size:
        raise UserError(f"{broken} its sequences end at byte {end}, the .bin has {bin_size}; {REMEDY}")
    return header, end // header.token_bytes


def _check_sequences(idx: Path, header: IndexHeader, bin_size: int, broken: str) -> int:
    """Check lengths and pointers; return the byte at which the last sequence ends."""
    end, first = 0, 0
    lengths = chunks(idx, HEADER.size, header.num_sequences, "<i4", broken)
    pointers = chunks(idx, header.pointers_at, header.num_sequences, "<i8", broken)
    for lengths_N, pointers_N in zip(lengths, pointers, strict=True):
        if lengths_N.min() < 0:
            wrong = int(np.argmax(lengths_N < 0))
            raise UserError(f"{broken} sequence {first + wrong} has length {lengths_N[wrong]}; {REMEDY}")
        ends_N = np.cumsum(lengths_N, dtype=np.int64) * header.token_bytes + end
        starts_N = np.concatenate(([end], ends_N[:-1]))
        if not np.array_equal(starts_N, pointers_N):
            wrong = int(np.argmax(starts_N != pointers_N))
            raise UserError(
                f"{broken} sequence {first + wrong} begins at byte {pointers_N[wrong]}, expected "
                f"{starts_N[wrong]} by the lengths before it; {REMEDY}"
            )
        end, first = int(ends_N[-1]), first + len(lengths_N)
        if end > bin_size:
            wrong = first - len(lengths_N) + int(np.argmax(ends_N > bin_size))
            raise UserError(f"{broken} sequence {wrong} ends after the .bin's {bin_size} bytes; {REMEDY}")
    return end


def _check_boundaries(idx: Path, header: IndexHeader, broken: str) -> None:
    last: int | None = None
    for boundaries_N in chunks(idx, header.boundaries_at, header.num_boundaries, "<i8", broken):
        if last is None and boundaries_N[0] != 0:
            raise UserError(f"{broken} the first document begins at sequence {boundaries_N[0]}; {REMEDY}")
        if boundaries_N[0] < (last or 0) or np.any(boundaries_N[1:] < boundaries_N[:-1]):
            raise UserError(f"{broken} its document boundaries do not ascend; {REMEDY}")
        last = int(boundaries_N[-1])
    if last != header.num_sequences:
        raise UserError(
            f"{broken} the last document ends at sequence {last}, there are {header.num_sequences}; {REMEDY}"
        )


def chunks(idx: Path, place: int, count: int, dtype: str, broken: str) -> Iterator[np.ndarray]:
    """Yield the `count` numbers from byte `place` on, at most CHUNK at a time."""
    try:
        with open_plain(idx) as file:
            file.seek(place)
            for first in range(0, count, CHUNK):
                size = min(CHUNK, count - first) * np.dtype(dtype).itemsize
                content = file.read(size)
                if len(content) < size:
                    raise UserError(f"{broken} it was truncated while it was read; {REMEDY}")
                yield np.frombuffer(content, dtype)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{broken} not readable: {reason(error)}") from error
