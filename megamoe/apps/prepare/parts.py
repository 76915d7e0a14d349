"""A large dataset written in parts: by several processes, each part once, also after a kill.

A part is a dataset of its own (.bin, .idx, counts) in the folder of the unfinished preparation. Its record
is written last, by renaming, with the key of what the part was made from. Finished parts are appended to the
.bin one by one, and each is deleted after it was appended, so that the disk never holds all tokens twice. A
record whose own .bin is gone belongs to an appended part. The result depends on the parts alone, not
on the number of processes or of interruptions.
"""

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megamoe.apps.prepare.index_writer import read_lengths, write_index
from megamoe.apps.prepare.sources import Source
from megamoe.apps.prepare.write import start_worker
from megamoe.data.card import DataFiles
from megamoe.errors import UserError
from megamoe.io import read_json, replace_file, sync

FOLDER = "parts"
RECORDS = f"{FOLDER}/*.json"
MOST_PARTS = 4096
LARGEST_RECORD = 1 << 28
Record = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """The files of one part, the sources that it is made of, and a key of everything that it depends on."""

    files: DataFiles
    sources: tuple[Source, ...]
    key: str

    @property
    def source_bytes(self) -> int:
        """Return the bytes of its sources."""
        return sum(source.size for source in self.sources)

    @property
    def _record(self) -> Path:
        return self.files.prefix.with_suffix(".json")

    def finish(self, facts: Record) -> None:
        """Mark the part, whose files are written, as finished.

        facts: plain data to keep with it; `documents` is their number.
        """
        for path in (self.files.bin, self.files.idx, self.files.counts):
            sync(path)
        record = {"key": self.key, "size": self.files.bin.stat().st_size, "facts": facts}
        replace_file(self._record, json.dumps(record).encode())

    def read(self) -> Record | None:
        """Return the record of a finished part: `size` of its .bin in bytes, and `facts`."""
        try:
            record: Record = read_json(self._record, LARGEST_RECORD)
            return record if record["key"] == self.key else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def discard(self) -> None:
        """Delete the record, before the part is written again."""
        self._record.unlink(missing_ok=True)


def cut(sources: Sequence[Source], smallest: int) -> list[tuple[Source, ...]]:
    """Return consecutive sources in groups of at least `smallest` bytes, and at most MOST_PARTS groups."""
    sizes = [source.size for source in sources]
    least = max(smallest, -(-sum(sizes) // MOST_PARTS))
    groups: list[list[Source]] = [[]]
    total = 0
    for source, size in zip(sources, sizes, strict=True):
        if total >= least:
            groups.append([])
            total = 0
        groups[-1].append(source)
        total += size
    return [tuple(group) for group in groups]


def unfinished(parts: Sequence[Part], joined: Path) -> list[Part]:
    """Return the parts that must be written: without a record, or gone and not in `joined` either."""
    available = joined.stat().st_size if joined.exists() else 0
    missing, end, is_appended = [], 0, True
    for part in parts:
        record = part.read()
        if record is None:
            missing.append(part)
            is_appended = False
            continue
        end += record["size"]
        is_there = part.files.bin.exists()
        is_appended = is_appended and not is_there and end <= available
        if not is_there and not is_appended:
            missing.append(part)
    return missing


def write_parts(
    parts: Sequence[Part], write: Callable[[Part], Record], workers: int, advance: Callable[[Part], Any]
) -> None:
    """Write each part by `write`, which returns the facts of its record, in so many processes.

    Args:
        write: can be pickled; writes .bin, .idx and counts of the part.
        advance: called with each part that is finished.

    Raises:
        UserError: the first of `write`, or if a worker dies. The other workers are ended at once.
    """
    if workers == 1:
        for part in parts:
            _write(write, part)
            advance(part)
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        min(workers, max(1, len(parts))), multiprocessing.get_context("spawn"), initializer=start_worker
    )
    try:
        futures = {pool.submit(_write, write, part): part for part in parts}
        for future in as_completed(futures):
            future.result()
            advance(futures[future])
    except BaseException as error:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        if isinstance(error, BrokenProcessPool):
            raise UserError(
                f"workers {workers}: one died, most likely for want of memory; try fewer workers. Finished "
                "parts are kept: the same command goes on"
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _write(write: Callable[[Part], Record], part: Part) -> None:
    part.discard()
    part.finish(write(part))


def join_parts(parts: Sequence[Part], files: DataFiles, dtype: type[np.number]) -> np.ndarray:
    """Join finished parts to one dataset; return the counts of its tokens, int64 [vocabulary].

    The memory that is used does not grow with the parts' sizes.
    """
    end = 0
    with open(files.bin, "ab") as out:
        for part in parts:
            record = part.read()
            assert record is not None, "every part is finished"
            if part.files.bin.exists():
                out.truncate(end)
                with open(part.files.bin, "rb") as content:
                    shutil.copyfileobj(content, out, 1 << 24)
                out.flush()
                os.fsync(out.fileno())
                part.files.bin.unlink()
            end += record["size"]
        out.truncate(end)

    def lengths() -> Iterator[np.ndarray]:
        for part in parts:
            record = part.read()
            assert record is not None
            yield from read_lengths(part.files.idx, record["facts"]["documents"])

    write_index(files.idx, dtype, lengths())
    counts_V: np.ndarray = np.load(parts[0].files.counts, allow_pickle=False)
    for part in parts[1:]:
        counts_V += np.load(part.files.counts, allow_pickle=False)
    np.save(files.counts, counts_V, allow_pickle=False)
    return counts_V
