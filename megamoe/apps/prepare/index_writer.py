"""Writing the `.idx` file of Megatron-Core's indexed datasets; `data/index_file.py` has its layout."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from megamoe.data.index_file import (
    CHUNK,
    HEADER,
    MAGIC,
    MOST_SEQUENCES,
    TOKEN_DTYPES,
    VERSION,
    chunks,
    read_header,
)
from megamoe.errors import UserError

MOST_TOKENS = 2**31 - 1  # of a sequence; its length is an int32


def token_dtype(vocab_size: int) -> type[np.number]:
    """Return the dtype of the tokens in a .bin, as Megatron-Core chooses it (`DType.optimal_dtype`)."""
    return np.uint16 if vocab_size < 65500 else np.int32


def write_index(idx: Path, dtype: type[np.number], lengths: Iterable[np.ndarray]) -> None:
    """Write the index of documents of one sequence each, as Megatron-Core's `IndexedDatasetBuilder` does.

    Args:
        dtype: of the tokens.
        lengths: the documents' lengths in tokens, int [N] at a time; they are not kept.

    Raises:
        UserError: if a document, or their number, is too large for the format.
    """
    code = {name: code for code, name in TOKEN_DTYPES.items()}[np.dtype(dtype).name]
    count = 0
    with open(idx, "wb") as out:
        out.write(bytes(HEADER.size))
        for lengths_N in lengths:
            if lengths_N.size and lengths_N.max() > MOST_TOKENS:
                raise UserError(f"a document has {lengths_N.max()} tokens; expected at most 2^31 - 1")
            out.write(lengths_N.astype("<i4").tobytes())
            count += len(lengths_N)
        if count > MOST_SEQUENCES:
            raise UserError(f"{count} documents; expected at most 2^31 - 1: write several datasets")
        out.seek(0)
        out.write(HEADER.pack(MAGIC, VERSION, code, count, count + 1))
        out.seek(0, os.SEEK_END)
        end = 0
        for lengths_N in read_lengths(idx, count):
            ends_N = np.cumsum(lengths_N, dtype="<i8") * np.dtype(dtype).itemsize + end
            out.write(np.concatenate(([end], ends_N[:-1])).astype("<i8").tobytes())
            end = int(ends_N[-1])
        for first in range(0, count + 1, CHUNK):
            out.write(np.arange(first, min(first + CHUNK, count + 1), dtype="<i8").tobytes())


def read_lengths(idx: Path, count: int | None = None) -> Iterator[np.ndarray]:
    """Yield the lengths of the sequences, int32 [N] at a time; count: their number, if known."""
    if count is None:
        count = read_header(idx)[0].num_sequences
    yield from chunks(idx, HEADER.size, count, "<i4", f"data index {str(idx)!r} is")
