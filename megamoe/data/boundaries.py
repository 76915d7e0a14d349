"""Where documents end, in data whose documents do not all end with the end-of-document token.

prepare_data.py ends each document with it. Megatron-LM's preprocess_data.py does so with --append-eod only,
and with its own tokenizer's token. The .idx has the boundaries in either case.
"""

import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megamoe.config.schema import DataConfig
from megamoe.data.batches import warn
from megamoe.data.blocks import BLOCK_BYTES
from megamoe.data.byte_files import LocalBytes, is_stored, open_bytes
from megamoe.data.card import DataFiles, load_card
from megamoe.data.index_file import CHUNK, read_header, tokens_before
from megamoe.data.ranks import once_per_machine, rank
from megamoe.data.verify import CHUNK_BYTES, ScanCache, cache_folder
from megamoe.errors import UserError

STEP = 64  # documents whose starts are read at a time


class DocumentStarts(Sequence[int]):
    """The token at which each document begins, and last the number of tokens; read from an .idx."""

    def __init__(self, idx: Path) -> None:
        self._header, _ = read_header(idx)
        self._file = LocalBytes(idx)
        self._tokens = tokens_before(idx, self._header.num_sequences)

    def __len__(self) -> int:
        return self._header.num_boundaries

    def __getitem__(self, number: int) -> int:  # type: ignore[override]
        if number >= len(self):
            raise IndexError(number)
        sequence = self._number(self._header.boundaries_at, number)
        if sequence == self._header.num_sequences:
            return self._tokens
        return self._number(self._header.pointers_at, sequence) // self._header.token_bytes

    def _number(self, place: int, number: int) -> int:
        return int.from_bytes(self._file.read(place + 8 * number, 8), "little")

    def between(self, first: int, last: int) -> list[int]:
        """Return the documents' first tokens that lie after token `first` and before token `last`."""
        found: list[int] = []
        for number in range(bisect_right(self, first), len(self), STEP):
            starts_N = self._slice(number, min(number + STEP, len(self)))
            found += starts_N[starts_N < last].tolist()
            if starts_N[-1] >= last:
                break
        return found

    def chunks(self) -> Iterator[np.ndarray]:
        """Yield all, int64 [N] at a time; the last of each is the first of the next."""
        for first in range(0, len(self) - 1, CHUNK):
            yield self._slice(first, min(first + CHUNK + 1, len(self)))

    def _slice(self, first: int, last: int) -> np.ndarray:
        header = self._header
        sequences_N = self._read(header.boundaries_at, first, last)
        low, high = int(sequences_N[0]), min(int(sequences_N[-1]) + 1, header.num_sequences)
        pointers = self._read(header.pointers_at, low, high)
        starts = np.append(pointers // header.token_bytes, self._tokens)  # the one after the last sequence
        return starts[sequences_N - low]

    def _read(self, place: int, first: int, last: int) -> np.ndarray:
        return np.frombuffer(self._file.read(place + 8 * first, 8 * (last - first)), "<i8")


class Ends(NamedTuple):
    """Documents that are not empty; those that end with the end-of-document token; how often it occurs."""

    documents: int
    ended: int
    tokens: int


def count_ends(prefix: Path, eod: int, most_bytes: float, stop: threading.Event | None = None) -> Ends:
    """Return the counts of a dataset's first `most_bytes`, in whole chunks.

    Raises:
        UserError: if it cannot be read, or `stop` was set.
    """
    files = DataFiles(prefix)
    tokens, dtype = open_bytes(files.bin), np.dtype(read_header(files.idx)[0].dtype)
    counts = np.zeros(3, dtype=np.int64)
    for starts_N in DocumentStarts(files.idx).chunks():
        starts_N = np.unique(starts_N)
        step = CHUNK_BYTES // dtype.itemsize
        for first in range(int(starts_N[0]), int(starts_N[-1]), step):
            if first * dtype.itemsize >= most_bytes:
                break
            if stop is not None and stop.is_set():
                raise UserError(f"data file {str(files.bin)!r}: reading was interrupted")
            last = min(first + step, int(starts_N[-1]))
            size = dtype.itemsize * (last - first)
            tokens_N = np.frombuffer(tokens.read(dtype.itemsize * first, size), dtype)
            after_N = np.flatnonzero(tokens_N == eod) + first + 1
            ended = starts_N[np.searchsorted(starts_N, after_N)] == after_N
            low, high = np.searchsorted(starts_N, (first, last), side="right")
            counts += (high - low, ended.sum(), len(after_N))
    return Ends(*counts.tolist())


def indexed_documents(data: DataConfig, identities: Mapping[str, str], eod: int) -> set[str]:
    """Return the datasets of which not every document ends with `eod`: there the .idx says where they end.

    With `data.verify: full` the whole .bin is read, once; otherwise, and in object storage, its first 8 MiB.
    Data with a card is as it should be. With torch.distributed every rank must call it.

    identities: the SHA-256 of each dataset's .idx, by path.

    Raises:
        UserError: on every rank, if `eod` occurs and most documents do not end with it: it is an ordinary
            token of another tokenizer, or a document of the .idx is several.
    """

    def count(stop: threading.Event) -> dict[str, Ends]:
        bare = [path for path in identities if load_card(path) is None]
        return {path: _count(data, path, f"ends by {eod} and {identities[path]}", eod, stop) for path in bare}

    indexed = set()
    for found in once_per_machine(count).values():
        for path, ends in found.items():
            if ends.ended == ends.documents:
                continue
            wrong = (
                f"data {path!r}: {ends.documents - ends.ended:,} of {ends.documents:,} documents do not end "
                f"with the end-of-document token {eod}"
            )
            if ends.tokens and 2 * ends.ended < ends.documents:
                raise UserError(
                    f"{wrong}, which occurs {ends.tokens:,} times; set data.tokenizer to the one that made "
                    "the data, make it again with --append-eod, or set data.document_aware to false"
                )
            if path not in indexed and rank() == 0:
                warn(f"{wrong}; data.document_aware takes the boundaries of its .idx too")
            indexed.add(path)
    return indexed


def _count(data: DataConfig, path: str, key: str, eod: int, stop: threading.Event) -> Ends:
    """Return the counts of a dataset; key: the name under which those of a whole .bin are kept."""
    tokens = DataFiles(Path(path)).bin
    if data.verify != "full" or is_stored(tokens):
        return count_ends(Path(path), eod, BLOCK_BYTES, stop)
    known = ScanCache(cache_folder(data, path) / "verified")
    return Ends(*known.of(tokens, (key,), lambda: {key: count_ends(Path(path), eod, np.inf, stop)})[key])
