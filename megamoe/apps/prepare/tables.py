"""Documents in the columns of tables: parquet, and Arrow as `datasets.save_to_disk` writes it.

Needs pyarrow (the extra `parquet`). A parquet file is read by row groups, which are also the units that large
files are divided into; memory holds the pages and the rows of one batch. The SHA-256 of a table is that of
the documents that were taken from it, each with its length before it: other columns are never read.
"""

import ast
import hashlib
import operator
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

from megamoe.apps.prepare.documents import Document, Selection, Skipped
from megamoe.errors import UserError

PARQUET, ARROW = (".parquet",), (".arrow",)
BATCH_BYTES = 1 << 20
MOST_ROWS = 1024  # of a batch
BUFFER_BYTES = 1 << 20  # of a column that is read
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


def row_groups(file: Any, name: str) -> list[tuple[int, int]]:
    """Return rows and compressed size in bytes of each row group of an open parquet file.

    Raises:
        UserError: if it is no parquet file, or ends early.
    """
    with _told(name):
        metadata = pyarrow("pyarrow.parquet").ParquetFile(file).metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        return [
            (group.num_rows, sum(group.column(n).total_compressed_size for n in range(group.num_columns)))
            for group in groups
        ]


class TableReader:
    """The documents of a table, or of some row groups of one."""

    def __init__(
        self,
        file: Any,
        name: str,
        groups: range | None,
        num_bytes: int,
        selection: Selection,
        advance: Callable[[int], Any],
    ) -> None:
        """groups: the row groups of a parquet file; None: an Arrow file, whole. num_bytes: their size."""
        self.num_bytes = num_bytes
        self._file, self._name, self._groups = file, name, groups
        self._selection, self._advance = selection, advance
        self._digest = hashlib.sha256()

    def documents(self) -> Iterator[Document | Skipped]:
        batches = self._arrow_batches() if self._groups is None else self._parquet_batches(self._groups)
        condition, _ = condition_of(self._selection.where)
        for place, batch in batches:
            if condition is not None:
                with _told(self._name, place):
                    kept = batch.filter(condition)
                if kept.num_rows < batch.num_rows:
                    yield Skipped("--where", batch.num_rows - kept.num_rows)
                batch = kept
            column = batch.column(batch.schema.get_field_index(self._selection.column))
            if column.null_count:
                yield Skipped("null", column.null_count)
                column = column.drop_null()
            yield from self._values(column, place)

    def _values(self, column: Any, place: str) -> Iterator[Document]:
        if self._selection.ids is None:
            try:
                texts = column.to_pylist()
            except UnicodeDecodeError as error:
                raise UserError(f"{self._name}: {place}: not UTF-8 text: {error.reason}") from error
            for text in texts:
                data = text.encode("utf-8")
                self._digest.update(len(data).to_bytes(8, "little") + data)
                yield text
            return
        for value in column:
            values = value.values
            try:
                if values.null_count:
                    raise ValueError(f"{place}: a token id is null")
                ids = self._selection.checked(values.to_numpy(zero_copy_only=False), place)
            except ValueError as error:
                raise UserError(f"{self._name}: {error}") from error
            self._digest.update(len(ids).to_bytes(8, "little") + ids.astype("<i8").tobytes())
            yield ids

    def sha256(self) -> str:
        return self._digest.hexdigest()

    def close(self) -> None:
        self._file.close()

    def _parquet_batches(self, groups: range) -> Iterator[tuple[str, Any]]:
        """Yield a place for messages and a batch, of each row group in turn."""
        with _told(self._name):
            parquet = pyarrow("pyarrow.parquet").ParquetFile(self._file, buffer_size=BUFFER_BYTES)
            schema = parquet.schema_arrow
        columns = self._columns(schema)
        for number in groups:
            place = f"row group {number}"
            with _told(self._name, place):
                rows, size = _rows_of(parquet.metadata.row_group(number), columns)
                count = max(1, min(MOST_ROWS, BATCH_BYTES * rows // max(size, 1)))
                batches = parquet.iter_batches(count, [number], columns, use_threads=False)
            share = self._share(number, groups, parquet.metadata)
            done = 0
            while True:
                with _told(self._name, place):
                    batch = next(batches, None)
                if batch is None:
                    break
                yield place, batch
                before, done = done, done + batch.num_rows
                self._advance(share * done // rows - share * before // rows)

    def _share(self, number: int, groups: range, metadata: Any) -> int:
        """Return a row group's part of `num_bytes`: by rows, the last takes the rest."""
        total = sum(metadata.row_group(n).num_rows for n in groups) or 1
        before = sum(metadata.row_group(n).num_rows for n in groups if n < number)
        after = before + int(metadata.row_group(number).num_rows)
        return self.num_bytes * after // total - self.num_bytes * before // total

    def _arrow_batches(self) -> Iterator[tuple[str, Any]]:
        ipc = pyarrow("pyarrow").ipc
        with _told(self._name):
            is_file = bytes(self._file.read(6)) == b"ARROW1"
            self._file.seek(0)
            reader = ipc.open_file(self._file) if is_file else ipc.open_stream(self._file)
        names = self._columns(reader.schema)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
        number, position = 0, 0
        while True:
            place = f"record batch {number}"
            with _told(self._name, place):
                batch = next(batches, None)
                if batch is None:
                    break
                batch = batch.select(names)
            count = max(1, min(MOST_ROWS, BATCH_BYTES * batch.num_rows // max(batch.nbytes, 1)))
            for first in range(0, batch.num_rows, count):
                yield place, batch.slice(first, count)
            number += 1
            before, position = position, min(self._file.tell(), self.num_bytes)
            self._advance(max(0, position - before))
        self._advance(self.num_bytes - position)

    def _columns(self, schema: Any) -> list[str]:
        """Return the columns to read; raise a UserError if one is missing or has no documents."""
        wanted = self._selection.column
        option = "--key" if self._selection.ids is None else "--ids-column"
        columns = [wanted, *condition_of(self._selection.where)[1]]
        for column, by in zip(columns, [option, *["--where"] * len(columns)], strict=False):
            if column not in schema.names:
                raise UserError(
                    f"{self._name}: no column {column!r} (it has {', '.join(schema.names)}); give {by}"
                )
        kind = schema.field(wanted).type
        types = pyarrow("pyarrow").types
        if types.is_dictionary(kind):
            kind = kind.value_type
        if self._selection.ids is None:
            fits = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
            expected = "text"
        else:
            is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
            fits, expected = is_list and types.is_integer(kind.value_type), "lists of whole numbers"
        if not fits:
            raise UserError(
                f"{self._name}: column {wanted!r} holds {kind}, expected {expected}; give {option}"
            )
        return list(dict.fromkeys(columns))


def _rows_of(group: Any, columns: list[str]) -> tuple[int, int]:
    """Return a row group's rows, and the bytes of these columns when they are unpacked."""
    found = [group.column(number) for number in range(group.num_columns)]
    wanted = [column for column in found if column.path_in_schema.split(".")[0] in columns]
    return group.num_rows, sum(column.total_uncompressed_size for column in wanted)


class _told:
    """Turns what pyarrow raises inside the block into a UserError that names the file and the place."""

    def __init__(self, name: str, place: str = "") -> None:
        self._name, self._place = name, f" {place}:" if place else ""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, _: object) -> None:
        if isinstance(error, UserError) or not isinstance(error, Exception):
            return
        text = " ".join(str(error).split())[:300]
        raise UserError(
            f"{self._name}:{self._place} cannot be read: {text}; expected a complete parquet or Arrow file"
        ) from error


def condition_of(where: tuple[str, ...]) -> tuple[Any, list[str]]:
    """Return conditions, all of which must hold, as an expression of pyarrow, and the columns that they name.

    A condition compares columns with constants: `language == 'en' and score >= 0.5`, `source in ('a', 'b')`,
    `score is not None`, joined by and, or, not. It is parsed, never run. A row without a value fails.

    Raises:
        UserError: for anything else.
    """
    if not where:
        return None, []
    columns: list[str] = []
    parsed = [_parsed(text, columns) for text in where]
    return reduce(operator.and_, parsed), columns


def _parsed(text: str, columns: list[str]) -> Any:
    refused = f"--where {text!r}: expected comparisons of columns with constants, such as language == 'en'"
    try:
        return _expression(ast.parse(text.strip(), mode="eval").body, columns)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise UserError(refused) from error


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
