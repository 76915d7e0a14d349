"""Shuffling the documents of finished parts while they are joined, with memory for a bucket of them.

The documents are sorted by a hash of the seed and of their number in the input. So the order depends on
neither the parts nor the buckets. The parts are scattered into bucket files by the first bits of the hash;
then each bucket is sorted and appended to the .bin. A bucket holds about BUCKET_BYTES of tokens, or
1 / MOST_BUCKETS of all.

After a kill the work goes on: a state file says which parts have been scattered, and how long each bucket was
then. A part is deleted when it lies in the buckets, and a bucket when it lies in the .bin.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megamoe.apps.prepare.parts import FOLDER, Part, summed_counts
from megamoe.data.card import DataFiles
from megamoe.data.index_file import read_lengths, write_index
from megamoe.io import read_json, replace_file, sync

BUCKET_BYTES = 1 << 27
MOST_BUCKETS = 4096
BLOCK_TOKENS = 1 << 23  # of a part that are scattered at a time
BUCKETS = "buckets"
STATE = "state.json"
LARGEST_STATE = 1 << 20
Entry = np.dtype([("hash", "<u8"), ("number", "<i8"), ("length", "<i4")])  # of a document in a bucket


@dataclass
class _State:
    """What lies in the buckets: so many parts; and of each bucket the documents and the tokens.

    contents: of each of these parts, see `_content`.
    """

    key: str
    width: int  # of a token in bytes
    parts: int
    documents: list[int]
    tokens: list[int]
    contents: list[str]


def hashes_of(seed: int, first: int, count: int) -> np.ndarray:
    """Return the hashes of `count` documents from number `first` on, uint64 [count].

    SplitMix64 (Steele, Lea and Flood 2014): the output of a generator that is started by a hash of the seed.
    """
    start = int.from_bytes(hashlib.sha256(f"megamoe documents {seed}".encode()).digest()[:8], "little")
    numbers = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    numbers += np.uint64(start)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def scattered(parts: Sequence[Part], folder: Path, joined: Path, seed: int) -> int:
    """Return how many of the first parts lie in the buckets of an earlier run of `shuffle_parts`.

    Buckets that do not fit the parts, or have gone without lying in `joined`, are deleted.
    """
    buckets = folder / BUCKETS
    state = _read(buckets)
    if state is not None and _fits(state, parts, seed):
        gone = [n for n in range(len(state.tokens)) if not (buckets / f"{n}.tokens").exists()]
        written = sum(state.tokens[n] for n in gone) * state.width
        if written <= (joined.stat().st_size if joined.exists() else 0):
            return state.parts
    shutil.rmtree(buckets, ignore_errors=True)
    return 0


def shuffle_parts(
    parts: Sequence[Part], files: DataFiles, dtype: type[np.number], seed: int, folder: Path
) -> np.ndarray:
    """Write the documents of finished parts, shuffled, as one dataset.

    Returns:
        Each token's count, int64 [vocabulary].

    Args:
        folder: the parts' folder, in which the buckets are kept until they are written.
    """
    assert folder.name == FOLDER, folder
    buckets, width = folder / BUCKETS, np.dtype(dtype).itemsize
    state = _read(buckets)
    if state is None or not _fits(state, parts, seed):
        shutil.rmtree(buckets, ignore_errors=True)
        buckets.mkdir()
        total = sum(record["size"] for part in parts if (record := part.read()) is not None)
        number = min(MOST_BUCKETS, max(1, -(-total // BUCKET_BYTES)))
        state = _State(_key(parts, seed), width, 0, [0] * number, [0] * number, [])
        _keep(state, buckets)
    before = 0
    for place, part in enumerate(parts):
        record = part.read()
        assert record is not None, "every part is finished"
        documents = record["facts"]["documents"]
        if place >= state.parts:
            _cut_back(state, buckets)
            _scatter(part, documents, seed, before, state, buckets, dtype)
            state.parts = place + 1
            state.contents.append(_content(part))
            _keep(state, buckets)
        part.files.bin.unlink(missing_ok=True)
        before += documents
    _gather(state, buckets, files.bin)
    places = range(len(state.tokens))
    write_index(files.idx, dtype, (np.load(buckets / f"{n}.lengths.npy", allow_pickle=False) for n in places))
    counts_V = summed_counts(parts)
    np.save(files.counts, counts_V, allow_pickle=False)
    return counts_V


def _scatter(
    part: Part, documents: int, seed: int, first: int, state: _State, buckets: Path, dtype: type[np.number]
) -> None:
    """Append the documents of a part to their buckets, flushed to the disk; count them in `state`."""
    touched = set()
    with open(part.files.bin, "rb") as tokens:
        at = 0
        for lengths_N in _blocks(read_lengths(part.files.idx, documents)):
            block = np.frombuffer(tokens.read(int(lengths_N.sum()) * np.dtype(dtype).itemsize), dtype)
            ends_N = np.cumsum(lengths_N, dtype=np.int64)
            entries_N = np.empty(len(lengths_N), Entry)
            entries_N["hash"] = hashes_of(seed, first + at, len(lengths_N))
            entries_N["number"] = np.arange(first + at, first + at + len(lengths_N))
            entries_N["length"] = lengths_N
            at += len(lengths_N)
            places_N = (entries_N["hash"] >> np.uint64(32)) * np.uint64(len(state.tokens)) >> np.uint64(32)
            for bucket in np.unique(places_N).tolist():
                chosen = np.flatnonzero(places_N == bucket)
                pieces = [block[ends_N[n] - lengths_N[n] : ends_N[n]] for n in chosen.tolist()]
                with open(buckets / f"{bucket}.tokens", "ab") as out:
                    out.write(np.concatenate(pieces).tobytes())
                with open(buckets / f"{bucket}.entries", "ab") as out:
                    out.write(entries_N[chosen].tobytes())
                state.documents[bucket] += len(chosen)
                state.tokens[bucket] += sum(map(len, pieces))
                touched.add(bucket)
    for bucket in sorted(touched):
        sync(buckets / f"{bucket}.tokens")
        sync(buckets / f"{bucket}.entries")


def _blocks(lengths: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield lengths of consecutive documents that have about BLOCK_TOKENS together."""
    for lengths_N in lengths:
        places_N = np.cumsum(lengths_N, dtype=np.int64) // BLOCK_TOKENS
        yield from np.split(lengths_N, np.flatnonzero(np.diff(places_N)) + 1)


def _cut_back(state: _State, buckets: Path) -> None:
    """Cut off what a killed run has appended for a part that it did not finish."""
    for number, (documents, tokens) in enumerate(zip(state.documents, state.tokens, strict=True)):
        for ending, size in (("tokens", tokens * state.width), ("entries", documents * Entry.itemsize)):
            with open(buckets / f"{number}.{ending}", "ab") as file:
                file.truncate(size)


def _gather(state: _State, buckets: Path, bin_path: Path) -> None:
    """Append each bucket, sorted, to the .bin; keep its lengths for the index, and delete it."""
    end = 0
    with open(bin_path, "ab") as out:
        for number, size in enumerate(state.tokens):
            tokens, entries = buckets / f"{number}.tokens", buckets / f"{number}.entries"
            if tokens.exists():
                out.truncate(end)
                content = np.fromfile(tokens, np.dtype(f"u{state.width}"))
                entries_N = np.fromfile(entries, Entry)
                ends_N = np.cumsum(entries_N["length"], dtype=np.int64)
                order_N = np.lexsort((entries_N["number"], entries_N["hash"]))
                lengths_N = entries_N["length"]
                for n in order_N.tolist():
                    out.write(content[ends_N[n] - lengths_N[n] : ends_N[n]].tobytes())
                out.flush()
                os.fsync(out.fileno())
                np.save(buckets / f"{number}.lengths.npy", lengths_N[order_N], allow_pickle=False)
                sync(buckets / f"{number}.lengths.npy")
                tokens.unlink()
                entries.unlink()
            end += size * state.width
        out.truncate(end)


def _key(parts: Sequence[Part], seed: int) -> str:
    """Return what changes with the parts and the seed."""
    return hashlib.sha256(json.dumps([seed, *(part.key for part in parts)]).encode()).hexdigest()


def _content(part: Part) -> str:
    """Return what changes with the documents of a part; its record stays when they lie in the buckets."""
    record = part.read()
    return hashlib.sha256(json.dumps(record and record["facts"], sort_keys=True).encode()).hexdigest()


def _fits(state: _State, parts: Sequence[Part], seed: int) -> bool:
    """Whether the buckets are of these parts, and hold the documents that the first of them now have."""
    contents = [_content(part) for part in parts[: state.parts]]
    return state.key == _key(parts, seed) and state.contents == contents


def _keep(state: _State, buckets: Path) -> None:
    replace_file(buckets / STATE, json.dumps(asdict(state)).encode(), synced=True)


def _read(buckets: Path) -> _State | None:
    try:
        return _State(**read_json(buckets / STATE, LARGEST_STATE))
    except (OSError, ValueError, TypeError):
        return None
