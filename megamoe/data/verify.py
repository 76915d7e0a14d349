"""Verifying prepared data before training: every byte once, and again when a file has changed."""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from megamoe.config.schema import DataConfig
from megamoe.data.byte_files import is_stored, size_of
from megamoe.data.card import DataCard, DataFiles, check_files, load_card
from megamoe.data.index_file import REMEDY, check_arithmetic, read_header
from megamoe.data.ranks import once_per_machine, rank
from megamoe.errors import UserError
from megamoe.io import open_plain, read_json, real, reason, replace_file

CHUNK_BYTES = 1 << 22
# A file may change twice within one tick of its file system's clock, so a recent file is read again.
SETTLED_S = 2.0
MOST_BYTES_OF_RESULTS = 1 << 16

Results = dict[str, Any]


class ScanCache:
    """The results for files, stored as a small JSON file for each in `folder`. None: nothing is stored."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def of(self, path: Path, wanted: Iterable[str], find: Callable[[], Results]) -> Results:
        """Return at least the `wanted` results for `path`: the stored ones if the file has not changed,
        otherwise these and those of `find()`.

        Raises:
            UserError: if the file cannot be read, or changes while it is read.
        """
        state = _state(path)
        known = self._read(path, state)
        if known is not None and set(wanted) <= known.keys():
            return known
        begun = time.time()
        results = {**(known or {}), **find()}
        if _state(path) != state:
            raise UserError(f"data file {str(path)!r} changed while it was read; start again")
        if max(state["changed_ns"], state["modified_ns"]) < (begun - SETTLED_S) * 1e9:
            self._keep(path, state, results)
        return results

    def has(self, path: Path) -> bool:
        """Return whether results are stored for the file's current state."""
        return self._read(path, _state(path)) is not None

    def _place(self, path: Path) -> Path | None:
        name = hashlib.sha256(os.fsencode(real(path))).hexdigest()[:16]
        return self._folder and self._folder / f"{path.name}.{name}.json"

    def _read(self, path: Path, state: Results) -> Results | None:
        place = self._place(path)
        if place is None:
            return None
        try:
            content = read_json(place, MOST_BYTES_OF_RESULTS)
            if content["checksum"] == _checksum(state, content["facts"]):
                return dict(content["facts"])
        except (OSError, ValueError, TypeError, KeyError):
            pass  # missing or damaged: the file is read again
        return None

    def _keep(self, path: Path, state: Results, results: Results) -> None:
        place = self._place(path)
        if place is None:
            return
        content = {"state": state, "facts": results, "checksum": _checksum(state, results)}
        with suppress(OSError):  # an unwritable cache is reported by the code that needs it
            place.parent.mkdir(parents=True, exist_ok=True)
            replace_file(place, json.dumps(content).encode())


def _state(path: Path) -> Results:
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    return {
        "path": str(real(path)),
        "size": status.st_size,
        "inode": status.st_ino,
        "modified_ns": status.st_mtime_ns,
        "changed_ns": status.st_ctime_ns,
    }


def _checksum(state: Results, results: Results) -> str:
    return hashlib.sha256(json.dumps([state, results], sort_keys=True).encode()).hexdigest()


def unreadable(path: Path, error: Exception) -> UserError:
    """Return the error for a data file that cannot be read."""
    return UserError(f"data file {str(path)!r} cannot be read: {reason(error)}")


def scan(
    path: Path, *, dtype: str | None = None, hashed: bool = True, stop: threading.Event | None = None
) -> Results:
    """Read a file once; return its `sha256` if `hashed`, and its smallest and largest number under the key
    `dtype`.

    Takes CHUNK_BYTES of memory.

    Args:
        dtype: the dtype of the numbers that the file consists of; None: do not look at them.
        stop: an event that another thread sets to interrupt the reading.

    Raises:
        UserError: if the file cannot be read, or the reading was interrupted.
    """
    digest = hashlib.sha256()
    smallest, largest = [], []
    memory = memoryview(bytearray(CHUNK_BYTES))
    buffer = np.frombuffer(memory, np.uint8)
    try:
        with open_plain(path) as file:
            while size := _fill(file, memory):
                if stop is not None and stop.is_set():
                    raise UserError(f"data file {str(path)!r}: reading was interrupted")
                if hashed:
                    digest.update(memory[:size])
                if dtype is not None:
                    numbers_N = buffer[: size - size % np.dtype(dtype).itemsize].view(dtype)
                    smallest.append(int(numbers_N.min(initial=0)) if dtype[0] == "i" else 0)
                    largest.append(int(numbers_N.max(initial=0)))
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    results: Results = {"sha256": digest.hexdigest()} if hashed else {}
    if dtype is not None:
        results[dtype] = [min(smallest, default=0), max(largest, default=0)]
    return results


def _fill(file: Any, buffer: memoryview) -> int:
    """Fill the buffer; return the number of bytes read, which is smaller at the end of the file alone."""
    size = 0
    while size < len(buffer) and (found := file.readinto(buffer[size:])):
        size += found
    return size


MOST_THREADS = 8
TOLD_FROM_BYTES = 4e9  # some seconds of reading


def verify_sources(data: DataConfig, paths: Iterable[str], vocab_size: int) -> dict[str, str]:
    """Verify each dataset; return the SHA-256 of its .idx, which identifies its data, by path.

    `data.verify` decides: `full` reads .bin and .idx if they have changed; `structure` does not read the
    .bin, and a .bin in object storage is not read here. With torch.distributed initialised every rank must
    call it.

    Raises:
        UserError: on every rank, naming the file and what is wrong with it.
    """
    unique = list(dict.fromkeys(paths))

    def verify(stop: threading.Event) -> list[str]:
        known = {path: ScanCache(cache_folder(data, path) / "verified") for path in unique}
        if data.verify == "full":
            _warn_of_long_reading(known)
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
            try:
                done = [
                    pool.submit(verify_files, path, vocab_size, known[path], data.verify == "full", stop)
                    for path in unique
                ]
                return [future.result() for future in done]
            finally:
                stop.set()
                pool.shutdown(cancel_futures=True)

    found = once_per_machine(verify)
    for first, identities in found.items():
        for path, expected, identity in zip(unique, found[0], identities, strict=True):
            if identity != expected:
                raise UserError(
                    f"data {path!r} is not the same for ranks 0 and {first}: SHA-256 of the .idx "
                    f"{expected[:12]}... and {identity[:12]}...; copy it to all machines anew"
                )
    return dict(zip(unique, found[0], strict=True))


def cache_folder(data: DataConfig, path: str) -> Path:
    """Return `data.cache`, or the folder `cache` beside the dataset or its local copy."""
    return Path(data.cache) if data.cache else Path(path).parent / "cache"


def _warn_of_long_reading(known: dict[str, ScanCache]) -> None:
    files = {path: DataFiles(Path(path)).bin for path in known}
    local = {path: file for path, file in files.items() if file.exists()}
    size = sum(file.stat().st_size for path, file in local.items() if not known[path].has(file))
    if size > TOLD_FROM_BYTES and rank() == 0:
        print(f"data: {size / 1e9:.0f} GB are read to verify them, once (data.verify)", flush=True)


def verify_files(
    prefix: str, vocab_size: int, known: ScanCache, reads_bin: bool, stop: threading.Event | None = None
) -> str:
    """Compare the files with each other and with the card; return the SHA-256 of the .idx."""
    files, card = DataFiles(Path(prefix)), load_card(prefix)
    check_files(prefix, card)
    size = size_of(files.bin) or 0
    idx = known.of(files.idx, ("sha256", "tokens"), lambda: _find_in_index(files.idx, size, stop))
    header, _ = read_header(files.idx)
    if card is not None:
        _same_hash(files.idx, idx["sha256"], card.idx.sha256)
        if card.tokens != idx["tokens"]:
            raise UserError(
                f"data index {str(files.idx)!r} has {idx['tokens']} tokens, its card says {card.tokens}; "
                f"{REMEDY}"
            )
    if idx["tokens"] * header.token_bytes != size:
        raise UserError(f"data file {str(files.bin)!r} has {size} bytes for {idx['tokens']} tokens; {REMEDY}")
    if reads_bin and not is_stored(files.bin):  # its blocks are verified when they are fetched
        verify_bin(files.bin, card, header.dtype, vocab_size, known, stop)
    elif card is not None and (card.largest_token or 0) >= vocab_size:
        raise _outside(files.bin, f"{card.largest_token} (by its card)", vocab_size)
    return str(idx["sha256"])


def _find_in_index(idx: Path, bin_size: int, stop: threading.Event | None) -> Results:
    _, tokens = check_arithmetic(idx, bin_size)
    return {**scan(idx, stop=stop), "tokens": tokens}


def verify_bin(
    path: Path,
    card: DataCard | None,
    dtype: str,
    vocab_size: int,
    known: ScanCache,
    stop: threading.Event | None,
) -> int:
    """Verify the .bin; return its largest token id. Without a card there is no hash to compare with."""
    hashed = card is not None
    wanted = (dtype, "sha256") if hashed else (dtype,)
    facts = known.of(path, wanted, lambda: scan(path, dtype=dtype, hashed=hashed, stop=stop))
    if card is not None:
        _same_hash(path, facts["sha256"], card.bin.sha256)
    smallest, largest = facts[dtype]
    if smallest < 0 or largest >= vocab_size:
        raise _outside(path, _first_outside(path, dtype, vocab_size), vocab_size)
    return int(largest)


def _same_hash(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise UserError(
            f"data file {str(path)!r} is damaged or another dataset's: SHA-256 {found[:12]}..., its card "
            f"says {expected[:12]}...; {REMEDY}"
        )


def _outside(path: Path, token: str, vocab_size: int) -> UserError:
    return UserError(
        f"data file {str(path)!r}: token id {token} is outside of the vocabulary of {vocab_size}; {REMEDY}, "
        "or set data.tokenizer and model.vocab_size to what it was made with"
    )


def _first_outside(path: Path, dtype: str, vocab_size: int) -> str:
    """Return the first token id outside of the vocabulary, and its position, as text."""
    first = 0
    with open_plain(path) as file:
        while (tokens_N := np.frombuffer(file.read(CHUNK_BYTES), dtype)).size:
            wrong_N = np.flatnonzero((tokens_N < 0) | (tokens_N >= vocab_size))
            if wrong_N.size:
                place = first + int(wrong_N[0])
                return f"{tokens_N[wrong_N[0]]} (token {place}, byte {place * tokens_N.itemsize})"
            first += tokens_N.size
    return "that was there before"
