"""Token ids of other trainers, without an index: llm.c's files, and nanoGPT's, which have no header.

llm.c (`dev/data/data_common.py`) writes 256 int32 (magic, version, number of tokens, zeros), then the tokens,
with the end-of-document token before each document. nanoGPT (`data/openwebtext/prepare.py`) writes tokens
alone, with it behind each document. So it divides the documents of both.
"""

from collections.abc import Iterator
from typing import IO

import numpy as np

from megamoe.apps.prepare.documents import Selection, check_size
from megamoe.errors import UserError

HEADER_BYTES = 1024
FORMATS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # version and dtype by magic: GPT-2, Llama 3
CHUNK_BYTES = 1 << 20


def read_tokens(stream: IO[bytes], name: str, selection: Selection) -> Iterator[np.ndarray]:
    """Yield the documents of a file without their ends, int [tokens]. The last one may lack its end.

    Raises:
        UserError: for another header, a size that does not fit it, and ids outside of the vocabulary.
    """
    if not selection.vocab_size:
        raise UserError(f"{name}: holds ready tokens; name the tokenizer that made them, not train")
    start = stream.read(HEADER_BYTES)
    magic, version, expected = np.frombuffer(start[:12].ljust(12, b"\0"), "<i4").tolist()
    right, dtype = FORMATS.get(magic, (None, selection.raw_ids))
    if right is not None and (len(start) < HEADER_BYTES or version != right):
        raise UserError(
            f"{name}: its header of llm.c has version {version} and {len(start)} bytes, expected {right} and "
            f"{HEADER_BYTES}; copy or make it again"
        )
    if dtype is None:
        raise UserError(
            f"{name}: no header of llm.c (magic {' or '.join(map(str, FORMATS))}, found {magic}); add "
            "--raw-ids uint16 if it holds token ids alone, as nanoGPT writes them"
        )
    tokens = 0
    pending: list[np.ndarray] = []
    content = start if right is None else stream.read(CHUNK_BYTES)
    while content:
        if len(content) % np.dtype(dtype).itemsize:
            raise UserError(f"{name}: is truncated within a token of {dtype}")
        ids = np.frombuffer(content, dtype)
        begins = int(tokens == 0 and ids[0] == selection.eod)
        tokens += len(ids)
        *whole, rest = np.split(ids[begins:], np.flatnonzero(ids[begins:] == selection.eod) + 1)
        for end in whole:
            yield selection.checked(np.concatenate([*pending, end]), name)
            pending = []
        pending.append(rest)
        check_size(sum(piece.nbytes for piece in pending), name)
        content = stream.read(CHUNK_BYTES)
    if right is not None and tokens != expected:
        raise UserError(f"{name}: has {tokens:,} tokens, its header says {expected:,}; copy or make it again")
    if sum(map(len, pending)):
        yield selection.checked(np.concatenate(pending), name)
