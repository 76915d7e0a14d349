"""Reads tables by pyarrow: the process of `tables.py`, for a damaged file can crash the library.

It takes requests as JSON, the fields of `Table`. An answer is three messages: JSON, the sizes of documents in
bytes (int64), and the documents (UTF-8, or token ids as int64). Its memory, and its time for an answer, are
bounded. Memory holds the pages and the rows of one batch.
"""

import json
import resource
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from megamoe.apps.prepare.remote import RemoteFile
from megamoe.apps.prepare.tables import BATCH_BYTES, pyarrow
from megamoe.errors import UserError, listed, printable
from megamoe.object_storage import is_url

BUFFER_BYTES = 1 << 20  # of a column that is read
MOST_SECONDS = 600  # of a processor, for an answer
NOTHING = np.zeros(0, dtype=np.int64)
Answer = tuple[dict[str, Any], np.ndarray, Any]


def main(handle: int, most_bytes: int) -> None:
    """Answer requests until there are no more. most_bytes: of memory, beyond what it has."""
    connection = Connection(handle)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the caller, and so this process
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + most_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)  # SIGPROF ends the process, also in C++
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        for answer, sizes_N, data in Table(**request).answers():
            for message in (json.dumps(answer).encode(), sizes_N.tobytes(), data):
                connection.send_bytes(message)
            signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)


@dataclass
class Table:
    """A table, or some row groups of one.

    place: its name, for messages, and what is read of it. location: path or URL. column: of the documents,
    which `option` names (--key: texts, --ids-column: token ids); empty: the sizes of row groups are wanted.
    groups: the first row group and the one after the last.
    num_bytes: their size. most_rows: of a batch.
    """

    place: str
    location: str
    column: str = ""
    option: str = ""
    groups: tuple[int, int] = (0, 0)
    num_bytes: int = 0
    most_rows: int = 1

    def answers(self) -> Iterator[Answer]:
        """Yield what `_answers` does; last, an `error` in one line for what is raised."""
        try:
            yield from self._answers()
        except UserError as error:
            yield {"error": str(error)}, NOTHING, b""
        except Exception as error:
            text = "it needs too much memory" if isinstance(error, MemoryError) else printable(error)
            line = f"{self.place}: cannot be read: {text}; expected a complete parquet file"
            yield {"error": line}, NOTHING, b""

    def _answers(self) -> Iterator[Answer]:
        """Yield of each batch the place, what is skipped and the bytes that were read; then its documents; at
        the `end` an answer without.
        """
        with RemoteFile(self.location) if is_url(self.location) else open(self.location, "rb", 0) as file:
            if not self.column:
                metadata = pyarrow("pyarrow.parquet").ParquetFile(file).metadata
                groups = map(metadata.row_group, range(metadata.num_row_groups))
                sizes = [sum(column.total_compressed_size for column in _columns(group)) for group in groups]
                yield {"end": [max(0, size) for size in sizes]}, NOTHING, b""
                return
            for batch, advance in self._batches(file, *self.groups):
                column = batch.column(batch.schema.get_field_index(self.column))
                yield {"place": self.place, "null": column.null_count, "advance": advance}, NOTHING, b""
                for sizes_N, data in (_texts if self.option == "--key" else _ids)(column.drop_null()):
                    yield {"place": self.place}, sizes_N, data
        yield {"end": []}, NOTHING, b""

    def _batches(self, file: Any, first: int, end: int) -> Iterator[tuple[Any, int]]:
        """Yield batches and their parts of `num_bytes`."""
        parquet = pyarrow("pyarrow.parquet").ParquetFile(file, buffer_size=BUFFER_BYTES)
        self._check(parquet.schema_arrow)
        groups = [parquet.metadata.row_group(number) for number in range(first, end)]
        total = max(1, sum(group.num_rows for group in groups))
        name, done = self.place, 0
        for number, group in enumerate(groups, start=first):
            self.place = f"{name}: row group {number}"
            wanted = [each for each in _columns(group) if each.path_in_schema.split(".")[0] == self.column]
            num_bytes = max(sum(each.total_uncompressed_size for each in wanted), 1)
            count = max(1, min(self.most_rows, BATCH_BYTES * group.num_rows // num_bytes))
            for batch in parquet.iter_batches(count, [number], [self.column], use_threads=False):
                before, done = done, done + batch.num_rows
                yield batch, self.num_bytes * done // total - self.num_bytes * before // total

    def _check(self, schema: Any) -> None:
        """Raise a UserError if the column is missing, double, or has no documents."""
        if (count := schema.names.count(self.column)) != 1:
            found = f"{count} columns" if count else "no column"
            raise UserError(
                f"{self.place}: {found} {self.column!r} (it has {listed(schema.names)}); give {self.option}"
            )
        kind = schema.field(self.column).type
        types = pyarrow("pyarrow").types
        if types.is_dictionary(kind):
            kind = kind.value_type
        if self.option == "--key":
            fits = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
            expected = "text"
        else:
            is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
            fits, expected = is_list and types.is_integer(kind.value_type), "lists of whole numbers"
        if not fits:
            raise UserError(
                f"{self.place}: column {self.column!r} holds {printable(kind, 60)}, expected {expected}; "
                f"give {self.option}"
            )


def _columns(group: Any) -> list[Any]:
    return [group.column(number) for number in range(group.num_columns)]


def _texts(column: Any) -> Iterator[tuple[np.ndarray, Any]]:
    """Yield sizes in bytes and the bytes of some texts.

    A dictionary may have a long text once for many rows; it is decoded in pieces.
    """
    compute, text = pyarrow("pyarrow.compute"), pyarrow().large_string()
    if pyarrow().types.is_dictionary(column.type):
        sizes = compute.binary_length(column.dictionary).take(column.indices)
    else:
        column = column.cast(text)
        sizes = compute.binary_length(column)
    for rows in _pieces(sizes.to_numpy(False)):
        piece = column[rows].cast(text)
        ends = np.frombuffer(piece.buffers()[1], np.int64)[piece.offset : piece.offset + len(piece) + 1]
        yield np.diff(ends), memoryview(piece.buffers()[2] or b"")[ends[0] : ends[-1]]


def _ids(column: Any) -> Iterator[tuple[np.ndarray, Any]]:
    """Yield sizes in bytes and the token ids, int64, of some lists."""
    if column.flatten().null_count:
        raise ValueError("a token id is null")
    sizes_N = 8 * pyarrow("pyarrow.compute").list_value_length(column).to_numpy(False).astype(np.int64)
    for rows in _pieces(sizes_N):
        yield sizes_N[rows], column[rows].flatten().cast("int64").to_numpy().tobytes()


def _pieces(sizes_N: np.ndarray) -> Iterator[slice]:
    """Yield consecutive rows that have about BATCH_BYTES together, or are one row."""
    ends_N = np.cumsum(sizes_N, dtype=np.int64) // BATCH_BYTES
    starts = np.flatnonzero(np.diff(ends_N, prepend=-1))
    yield from map(slice, starts, [*starts[1:], len(sizes_N)])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
