"""The examples of a task: files as users have them, checked, and written in the form that objectives read."""

import csv
import glob
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamoe.apps.finetune.label_files import ENDING, LABELS, LARGEST, Line
from megamoe.apps.finetune.objectives.labelled import Labelled
from megamoe.apps.finetune.task import SET_NAME, VALID, Task
from megamoe.errors import UserError, listed, printable
from megamoe.io import parse_json, read_plain, reason, replace_file
from megamoe.registry import get_part

TRAIN, TEST = "train", "test."
Row = dict[str, Any]


class Tabs(csv.excel_tab):
    """A .tsv: its cells have no quotes."""

    quoting = csv.QUOTE_NONE


TABLES: dict[str, type[csv.Dialect]] = {".tsv": Tabs, ".csv": csv.excel}


@dataclass(frozen=True)
class Examples:
    """All examples of a task.

    labels: the names, in the order of their numbers; none of a task without. sets: the rows by the names
    train, valid and test.NAME, with the keys that the objective reads. left_out: what is wrong with each line
    that is no example.
    """

    labels: list[str]
    sets: dict[str, list[Row]]
    left_out: Sequence[str] = ()

    @property
    def tests(self) -> list[str]:
        """The names of the test sets."""
        return [name.removeprefix(TEST) for name in self.sets if name.startswith(TEST)]


def read_examples(task: Task, bad_lines: str = "error") -> Examples:
    """Read and check all files of a task. bad_lines: `skip` leaves lines out that are no examples.

    Raises:
        UserError: naming the file, and the line of an example that is not what the kind of task has.
    """
    paths = {TRAIN: task.train}
    if task.valid is not None:
        paths[VALID] = task.valid
    paths |= {TEST + name: path for name, path in _test_files(task).items()}
    left_out: list[str] | None = [] if bad_lines == "skip" else None
    lines = {name: _lines(task, path, left_out) for name, path in paths.items()}
    labels = _labels(task, lines[TRAIN])
    if task.kind_of_task.has_labels:
        for of_set in lines.values():
            _check_labels(of_set, labels)
    if task.positive is not None and task.positive not in labels:
        raise UserError(f"positive: {task.positive!r} is no label of the task; it has {listed(labels)}")
    sets = {name: [line.content for line in of_set] for name, of_set in lines.items()}
    return Examples(labels, sets, left_out or ())


def write_examples(examples: Examples, folder: Path) -> None:
    """Write the files that the training objectives read.

    Raises:
        OSError: if one cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if examples.labels:
        replace_file(folder / LABELS, (json.dumps({"labels": examples.labels}, indent=1) + "\n").encode())
    for name, rows in examples.sets.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        replace_file(folder / f"{name}{ENDING}", text.encode())


def labels_of(rows: list[Row]) -> list[str]:
    """Return the labels of rows, of words one after the other."""
    return [label for row in rows for label in (row["tags"] if "tags" in row else [row["label"]])]


def _test_files(task: Task) -> dict[str, str]:
    """Return the test files by name."""
    if not isinstance(task.test, str):
        return task.test
    before, _, after = task.test.partition("*")
    if "*" in after:
        raise UserError(f"test: {task.test!r} has several *; expected one, which stands for the name")
    found = {}
    for path in sorted(glob.glob(f"{glob.escape(before)}*{glob.escape(after)}")):
        name = path[len(before) : len(path) - len(after)]
        if SET_NAME.fullmatch(name):
            found[name] = path
    if not found:
        raise UserError(f"test: {task.test!r} names no file; name one that exists")
    for language in task.languages or []:
        if language not in found:
            raise UserError(f"languages: {language!r} has no data: no file {before}{language}{after}")
    if task.languages is not None:
        found = {language: found[language] for language in task.languages}
    if VALID in found:
        raise UserError(
            f"test: {task.test!r} finds {found[VALID]!r}, but {VALID} is the name of the validation set; "
            "name the wanted ones as languages, or choose another path"
        )
    return found


def _lines(task: Task, path: str, left_out: list[str] | None) -> list[Line]:
    """Return the rows of a file with the keys that the task's objective reads, checked.

    left_out: gets what is wrong with a line that is no example; None: that is an error.
    """
    try:
        content = read_plain(Path(path), LARGEST).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"{path!r} cannot be read: {reason(error)}; name a file of examples") from None
    ending = Path(path).suffix
    if ending in TABLES:
        rows = _table(path, content, TABLES[ending])
    elif ending == ENDING:
        rows = ((number, text) for number, text in enumerate(content.split("\n"), 1) if text.strip())
    else:
        raise UserError(f"{path!r}: expected a file that ends in {ENDING}, {' or '.join(TABLES)}")
    part: Any = get_part("objective", task.kind_of_task.objective)
    assert issubclass(part, Labelled)
    lines, bad = [], []
    for number, row in rows:
        where = f"{path!r}, line {number}"
        try:
            line = Line(where, _row(task, _content(row, where), where))
            part.verify(line)
            if task.kind_of_task.has_labels and not all(map(str.strip, labels_of([line.content]))):
                raise UserError(f"{where}: a label is empty; remove the line, or give the label a name")
        except UserError as error:
            if left_out is None:
                raise UserError(f"{error}; or leave such lines out with --bad-lines skip") from None
            bad.append(str(error))
        else:
            lines.append(line)
    if not lines:
        more = f"; the first of {len(bad)} bad lines: {bad[0]}" if bad else ""
        raise UserError(f"{path!r} has no examples; name another file, or leave the set out{more}")
    if left_out is not None:
        left_out += bad
    return lines


def _content(row: Any, where: str) -> Any:
    """Return what a row holds: a line of JSON, or the head and the cells of a table."""
    if not isinstance(row, str):
        head, cells = row
        if len(cells) != len(head):
            raise UserError(f"{where}: {len(cells)} cells, expected {len(head)} as in the first line")
        return dict(zip(head, cells, strict=True))
    try:
        content = parse_json(row)
        if "\\u" in row:
            json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: half of a surrogate pair (\\ud800 to \\udfff), which is no text") from None
    except ValueError:
        raise UserError(f"{where}: no JSON; expected an object a line") from None
    return content


def _table(path: str, content: str, dialect: type[csv.Dialect]) -> Iterator[tuple[int, Any]]:
    """Yield each row's line, head and cells, of a table with a head line."""
    csv.field_size_limit(LARGEST)
    rows = csv.reader(io.StringIO(content, newline=""), dialect)
    head: list[str] | None = None
    try:
        for cells in filter(None, rows):
            if head is None:
                head = cells
            else:
                yield rows.line_num, (head, cells)
    except csv.Error as error:
        raise UserError(f"{path!r}, line {rows.line_num}: {error}") from None


def _row(task: Task, content: Any, where: str) -> Row:
    """Return the columns of a row, by the kind's names."""
    kind = task.kind_of_task
    if not isinstance(content, dict):
        raise UserError(f"{where}: expected an object with the columns {', '.join(kind.columns)}")
    row = {}
    for key in (*kind.columns, *(key for key in kind.optional if key in task.columns)):
        column = task.columns.get(key, key)
        if column not in content:
            raise UserError(
                f"{where}: no column {column!r}; there is {listed(list(content))}: name yours as "
                f"columns.{key}"
            )
        row[key] = _value(kind.predicts, key, content[column], where)
    return row


def _value(predicts: str, key: str, value: Any, where: str) -> Any:
    """Return a cell as the objective reads it: labels may be numbers, and words one text."""
    if key == "label" and predicts == "number" and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise UserError(f"{where}: label {printable(value, 60)!r}, expected a number") from None
    if key == "label" and predicts == "label" and type(value) is int:
        return str(value)
    if key in ("words", "tags") and isinstance(value, str):
        return value.split()
    if key == "tags" and isinstance(value, list):
        return [str(each) if type(each) is int else each for each in value]
    return value


def _labels(task: Task, train: list[Line]) -> list[str]:
    """Return the names of the labels: those of the task, or the sorted ones of the training examples."""
    if not task.kind_of_task.has_labels:
        return []
    if task.labels is not None:
        return task.labels
    found = set(labels_of([line.content for line in train]))
    if len(found) < 2:
        raise UserError(f"{task.train!r}: all examples have the label {found.pop()!r}, expected at least 2")
    numbers = all(label.isdecimal() for label in found)
    return sorted(found, key=int) if numbers else sorted(found)


def _check_labels(lines: list[Line], labels: list[str]) -> None:
    known = set(labels)
    for line in lines:
        for label in labels_of([line.content]):
            if label not in known:
                raise UserError(
                    f"{line.where}: the task has no label {printable(label, 60)!r}; it has {listed(labels)}"
                )
