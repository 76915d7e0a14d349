"""Verifying prepared data before training: every byte once, and again when a file has changed.

One rank of each machine reads, several files at a time, and all ranks get its result. The results are cached
(`scan_cache.py`). Reading with SHA-256 takes about 1 s per 1.4 GB of a file.
"""

import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from megamoe.config.schema import DataConfig
from megamoe.data.card import DataCard, DataFiles, check_files, load_card
from megamoe.data.index_file import AGAIN, check_arithmetic, read_header
from megamoe.data.ranks import once_per_machine, rank
from megamoe.data.scan_cache import CHUNK_BYTES, Results, ScanCache, scan
from megamoe.errors import UserError

MOST_THREADS = 8
TOLD_FROM_BYTES = 4e9  # some seconds of reading
MOST_TOKEN_IDS = 2**63


def verify_sources(data: DataConfig, paths: Iterable[str], vocab_size: int) -> dict[str, str]:
    """Verify each dataset; return the SHA-256 of its .idx, which identifies its data, by path.

    `data.verify` decides: `full` reads .bin and .idx if they have changed; `structure` does not read the
    .bin. With torch.distributed initialised every rank must call it.

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
                    pool.submit(_verify, path, vocab_size, known[path], data.verify == "full", stop)
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
    """Return `data.cache`, or the folder `cache` beside the dataset."""
    return Path(data.cache) if data.cache else Path(path).parent / "cache"


def _warn_of_long_reading(known: dict[str, ScanCache]) -> None:
    files = {path: DataFiles(Path(path)).bin for path in known}
    size = sum(file.stat().st_size for path, file in files.items() if not known[path].has(file))
    if size > TOLD_FROM_BYTES and rank() == 0:
        print(f"data: {size / 1e9:.0f} GB are read to verify them, once (data.verify)", flush=True)


def _verify(
    prefix: str, vocab_size: int, known: ScanCache, reads_bin: bool, stop: threading.Event | None = None
) -> str:
    """Compare the files with each other and with the card; return the SHA-256 of the .idx."""
    files, card = DataFiles(Path(prefix)), load_card(prefix)
    check_files(prefix, card)
    size = files.bin.stat().st_size
    idx = known.of(files.idx, ("sha256", "tokens"), lambda: _find_in_index(files.idx, size, stop))
    header, _ = read_header(files.idx)
    if card is not None:
        _same_hash(files.idx, idx["sha256"], card.idx.sha256)
        if card.tokens != idx["tokens"]:
            raise UserError(
                f"data index {str(files.idx)!r} has {idx['tokens']} tokens, its card says {card.tokens}; "
                f"{AGAIN}"
            )
    if idx["tokens"] * header.token_bytes != size:
        raise UserError(f"data file {str(files.bin)!r} has {size} bytes for {idx['tokens']} tokens; {AGAIN}")
    if reads_bin:
        _verify_bin(files.bin, card, header.dtype, vocab_size, known, stop)
    elif card is not None and (card.largest_token or 0) >= vocab_size:
        raise _outside(files.bin, f"{card.largest_token} (by its card)", vocab_size)
    return str(idx["sha256"])


def _find_in_index(idx: Path, bin_size: int, stop: threading.Event | None) -> Results:
    _, tokens = check_arithmetic(idx, bin_size)
    return {**scan(idx, stop=stop), "tokens": tokens}


def _verify_bin(
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
            f"says {expected[:12]}...; {AGAIN}"
        )


def _outside(path: Path, token: str, vocab_size: int) -> UserError:
    return UserError(
        f"data file {str(path)!r}: token id {token} is outside of the vocabulary of {vocab_size}; {AGAIN}, "
        "or set data.tokenizer and model.vocab_size to what it was made with"
    )


def _first_outside(path: Path, dtype: str, vocab_size: int) -> str:
    """Return the first token id outside of the vocabulary, and its position, as text."""
    first = 0
    with open(path, "rb") as file:
        while (tokens_N := np.frombuffer(file.read(CHUNK_BYTES), dtype)).size:
            wrong_N = np.flatnonzero((tokens_N < 0) | (tokens_N >= vocab_size))
            if wrong_N.size:
                place = first + int(wrong_N[0])
                return f"{tokens_N[wrong_N[0]]} (token {place}, byte {place * tokens_N.itemsize})"
            first += tokens_N.size
    return "that was there before"


def verify_in_full(prefix: str) -> str:
    """Verify a whole dataset without the cache; return a line that says what was verified.

    Raises:
        UserError: naming the file and what is wrong with it.
    """
    files, card = DataFiles(Path(prefix)), load_card(prefix)
    check_files(prefix, card)
    vocab_size = card.tokenizer.vocab_size if card else MOST_TOKEN_IDS
    _verify(prefix, vocab_size, ScanCache(None), reads_bin=False)
    header, _ = read_header(files.idx)
    largest = _verify_bin(files.bin, card, header.dtype, vocab_size, ScanCache(None), None)
    if card is not None and card.largest_token not in (None, largest):
        raise UserError(
            f"data card {str(files.card)!r} says that the largest token id is {card.largest_token}, it is "
            f"{largest}; prepare the data again"
        )
    by = "sizes, SHA-256" if card else "no card, so no SHA-256 to compare with; sizes"
    return f"{prefix}: {by}, index and token ids (up to {largest}) are right"
