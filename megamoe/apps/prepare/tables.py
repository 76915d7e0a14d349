"""Documents in the columns of parquet tables.

Needs pyarrow (the extra `parquet`), which reads in another process (`table_child.py`), for a damaged file can
crash it. That process is kept for the next table. Row groups of parquet are the units that large files are
divided into. The SHA-256 of a table is that of the documents that were taken from it, each with its length
before it: other columns are never read.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from megamoe.apps.prepare.documents import Document, Selection, Skipped, check_size
from megamoe.data.card import SourceCard
from megamoe.errors import UserError

PARQUET = ".parquet"
BATCH_BYTES = 1 << 20
MOST_ROWS = 1024  # of a batch
LARGEST_PROCESS = 1 << 33  # bytes: a text of a GiB is there several times
LARGEST_ANSWER = 1 << 28  # bytes without documents
Answer = tuple[dict[str, Any], np.ndarray, bytes]  # plain data, sizes of documents in bytes, the documents


def pyarrow(module: str = "pyarrow") -> Any:
    """Return a module of pyarrow.

    Raises:
        UserError: if it is not installed.
    """
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError("parquet files need pyarrow; pip install 'megamoe[parquet]'") from None


def row_groups(location: str, name: str) -> list[int]:
    """Return the compressed size in bytes of each row group of a parquet file.

    Raises:
        UserError: if it is no parquet file, or ends early.
    """
    *_, (answer, _, _) = _answers({"place": name, "location": location})
    return answer["end"]


class TableReader:
    """The documents of a table, or of some row groups of one."""

    def __init__(
        self,
        location: str,
        name: str,
        groups: tuple[int, int] | None,
        num_bytes: int,
        selection: Selection,
        advance: Callable[[int], Any],
    ) -> None:
        """See `table_child.Table`."""
        self._name, self.num_bytes = name, num_bytes
        self._selection, self._advance, self._digest = selection, advance, hashlib.sha256()
        option = "--key" if selection.ids is None else "--ids-column"
        wanted = {"column": selection.column, "option": option, "groups": groups}
        sizes = {"num_bytes": num_bytes, "most_rows": MOST_ROWS}
        self._answers = _answers({"place": name, "location": location, **wanted, **sizes})

    def documents(self) -> Iterator[Document | Skipped]:
        for answer, sizes_N, data in self._answers:
            self._advance(answer.get("advance", 0))
            if answer.get("null"):
                yield Skipped("null", answer["null"])
            start = 0
            for size in sizes_N.tolist():
                yield self._document(data[start : start + size], answer["place"])
                start += size

    def _document(self, data: bytes, place: str) -> Document:
        try:
            document: Document = data.decode() if self._selection.ids is None else np.frombuffer(data, "<i8")
        except UnicodeDecodeError as error:
            raise UserError(f"{place}: not UTF-8 text: {error.reason}") from error
        size = len(data)
        if not isinstance(document, str):
            document = self._selection.checked(document, place)
            data, size = document.tobytes(), len(document)
        self._digest.update(size.to_bytes(8, "little"))
        self._digest.update(data)
        return document

    def card(self, documents: int) -> SourceCard:
        """Return what the data card says of the table; documents: their number."""
        return SourceCard(self._name, self.num_bytes, self._digest.hexdigest(), documents)

    def close(self) -> None:
        self._answers.close()


_idle: list[tuple[subprocess.Popen[bytes], Connection]] = []
os.register_at_fork(after_in_child=_idle.clear)


def _answers(request: dict[str, Any]) -> Generator[Answer, None, None]:
    """Yield what the process answers to a request, see `table_child.Table`.

    Raises:
        UserError: what it says of the file, or that it has died.
    """
    process, connection = _process()
    is_done = False
    try:
        connection.send_bytes(json.dumps(request).encode())
        while not is_done:
            answer = json.loads(connection.recv_bytes(LARGEST_ANSWER))
            sizes_N = np.frombuffer(connection.recv_bytes(LARGEST_ANSWER), np.int64)
            check_size(int(sizes_N.max(initial=0)), answer.get("place", ""))
            data = connection.recv_bytes()
            is_done = not answer.keys().isdisjoint(("end", "error"))
            if "error" in answer:
                raise UserError(answer["error"])
            yield answer, sizes_N, data
    except (EOFError, OSError, UnicodeError, json.JSONDecodeError) as error:
        process.kill()
        ended = signal.Signals(-process.wait()).name if process.wait() < 0 else f"code {process.wait()}"
        raise UserError(
            f"{request['place']}: cannot be read: pyarrow ended with {ended}; expected a complete parquet "
            "file, which fits in memory"
        ) from error
    finally:
        if is_done:
            _idle.append((process, connection))
        else:
            process.kill()
            process.wait()
            connection.close()


def _process() -> tuple[subprocess.Popen[bytes], Connection]:
    while _idle:
        process, ours = _idle.pop()
        if process.poll() is None:
            return process, ours
    ours, theirs = multiprocessing.Pipe()
    # BLAS would reserve memory for each thread.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", f"{__package__}.table_child"]
    with theirs:
        command += [str(theirs.fileno()), str(LARGEST_PROCESS)]
        null = subprocess.DEVNULL
        process = subprocess.Popen(
            command, stdin=null, stdout=null, stderr=null, env=environment, pass_fds=[theirs.fileno()]
        )
    return process, ours
