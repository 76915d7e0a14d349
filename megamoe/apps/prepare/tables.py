"""Documents in the columns of tables: parquet, and Arrow as `datasets.save_to_disk` writes it.

Needs pyarrow (the extra `parquet`), which reads in another process (`table_child.py`), for a damaged file can
crash it. That process is kept for the next table. Row groups of parquet are the units that large files are
divided into. The SHA-256 of a table is that of the documents that were taken from it, each with its length
before it: other columns are never read.
"""

import ast
import hashlib
import json
import multiprocessing
import operator
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from functools import reduce
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from megamoe.apps.prepare.documents import Document, Selection, Skipped, check_size
from megamoe.errors import UserError, printable

PARQUET, ARROW = (".parquet",), (".arrow",)
BATCH_BYTES = 1 << 20
MOST_ROWS = 1024  # of a batch
LARGEST_PROCESS = 1 << 33  # bytes: a text of a GiB is there several times
LARGEST_ANSWER = 1 << 28  # bytes without documents
OPERATORS = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Attribute)
REFUSED = (
    SyntaxError,
    ValueError,
    TypeError,
    ArithmeticError,
    NotImplementedError,
    RecursionError,
    MemoryError,
)
LONGEST_CONDITION, MOST_OPERATORS = 4096, 100  # characters, and operators: pyarrow recurses over them
Answer = tuple[dict[str, Any], np.ndarray, bytes]  # plain data, sizes of documents in bytes, the documents
COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le},
    **{ast.Gt: operator.gt, ast.GtE: operator.ge},
    ast.In: lambda field, values: _in(field, values),
    ast.NotIn: lambda field, values: ~_in(field, values),
    ast.Is: lambda field, _: field.is_null(),
    ast.IsNot: lambda field, _: ~field.is_null(),
}


def _in(field: Any, values: list[Any]) -> Any:
    """Return whether a field is one of the values: null for a row without a value, as in a comparison."""
    compute = pyarrow("pyarrow.compute")
    return compute.if_else(field.is_valid(), field.isin(values), compute.scalar(None).cast("bool"))


def pyarrow(module: str = "pyarrow") -> Any:
    """Return a module of pyarrow.

    Raises:
        UserError: if it is not installed.
    """
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError("parquet and Arrow files need pyarrow; pip install 'megamoe[parquet]'") from None


def row_groups(location: str, name: str) -> list[int]:
    """Return the compressed size in bytes of each row group of a parquet file.

    Raises:
        UserError: if it is no parquet file, or ends early.
    """
    *_, (answer, _, _) = _answers({"place": name, "location": location})
    sizes: list[int] = answer["end"]
    return sizes


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
        self.num_bytes = num_bytes
        self._selection, self._advance, self._digest = selection, advance, hashlib.sha256()
        option = "--key" if selection.ids is None else "--ids-column"
        wanted = {"column": selection.column, "option": option, "where": selection.where, "groups": groups}
        sizes = {"num_bytes": num_bytes, "most_rows": MOST_ROWS}
        self._answers = _answers({"place": name, "location": location, **wanted, **sizes})

    def documents(self) -> Iterator[Document | Skipped]:
        for answer, sizes_N, data in self._answers:
            self._advance(answer.get("advance", 0))
            for reason, count in answer.get("skipped", {}).items():
                if count:
                    yield Skipped(reason, count)
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

    def sha256(self) -> str:
        return self._digest.hexdigest()

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
            f"{request['place']}: cannot be read: pyarrow ended with {ended}; expected a complete parquet or "
            "Arrow file, which fits in memory"
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


def condition_of(where: tuple[str, ...]) -> tuple[Any, list[str]]:
    """Return conditions, all of which must hold, as an expression of pyarrow, and the columns that they name.

    A condition compares columns with constants: `language == 'en' and score >= 0.5`, `source in ('a', 'b')`,
    `score is not None`, joined by and, or, not. It is parsed, never run. A row without a value fails.

    Raises:
        UserError: for anything else, or if they are too long together.
    """
    if not where:
        return None, []
    if (length := sum(map(len, where))) > LONGEST_CONDITION:
        raise UserError(f"--where: {length:,} characters, expected at most {LONGEST_CONDITION:,}")
    columns: list[str] = []
    parsed = [_parsed(text, columns) for text in where]
    return reduce(operator.and_, parsed), columns


def _parsed(text: str, columns: list[str]) -> Any:
    try:
        tree = ast.parse(text.strip(), mode="eval")
        if sum(isinstance(node, OPERATORS) for node in ast.walk(tree)) > MOST_OPERATORS:
            raise ValueError
        return _expression(tree.body, columns)
    except REFUSED as error:
        raise UserError(
            f"--where {printable(text, 80)!r}: expected comparisons of columns with constants of up to 64 "
            f"bits, such as language == 'en', with at most {MOST_OPERATORS} operators"
        ) from error


def _expression(node: ast.AST, columns: list[str]) -> Any:
    if isinstance(node, ast.BoolOp):
        joined = operator.and_ if isinstance(node.op, ast.And) else operator.or_
        return reduce(joined, [_expression(value, columns) for value in node.values])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ~_expression(node.operand, columns)
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        raise ValueError
    path = _path(node.left)
    constant = ast.literal_eval(node.comparators[0])
    kind = type(node.ops[0])
    if kind in (ast.In, ast.NotIn) and not isinstance(constant, list | tuple | set):
        raise ValueError
    if (kind in (ast.Is, ast.IsNot)) != (constant is None):
        raise ValueError
    values = sorted(constant) if isinstance(constant, set) else constant
    columns.append(path[0])
    field = pyarrow("pyarrow.compute").field(*path)
    return COMPARED[kind](field, list(values) if isinstance(values, tuple) else values)


def _path(node: ast.AST) -> tuple[str, ...]:
    """Return the column that a node names, and the fields inside of it: `meta.language`."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return (*_path(node.value), node.attr)
    raise ValueError
