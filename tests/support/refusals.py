"""Tables of refusals: what is wrong, and the whole message, in `tests/snapshots/refusals/*.yaml`.

A row has an input and a `message`, which `pytest FILE --rewrite-messages` writes. The fixture
`expect_message` compares. Inputs of two kinds are read here: `overrides` of the tiny run, on `ranks`, and a
section `moe`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from megamoe.config import parse_config
from megamoe.errors import UserError
from megamoe.moe.validation import check_parts
from megamoe.parallel.zero.deepspeed_config import resolve_parallel
from megamoe.validation.run import validate
from tests.support.tiny import tiny

FOLDER = Path(__file__).parents[1] / "snapshots/refusals"


@dataclass
class Case:
    """A row of a table."""

    table: str
    name: str
    row: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.row[key]

    def rewrite(self, message: str | list[str]) -> None:
        """Write the message into the table."""
        rows = _read(self.table)
        rows[self.name]["message"] = message
        style: Any = {"sort_keys": False, "width": 110, "allow_unicode": True}
        text = yaml.dump(rows, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), **style)
        (FOLDER / f"{self.table}.yaml").write_text(text)


@cache
def _read(table: str) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = yaml.load(
        (FOLDER / f"{table}.yaml").read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    return rows


def cases(table: str, group: str = "") -> list[Any]:
    """The rows whose names start with `group`, as parameters of a test."""
    rows = _read(table).items()
    return [pytest.param(Case(table, name, row), id=name) for name, row in rows if name.startswith(group)]


def refusal(row: dict[str, Any]) -> str | list[str]:
    """The message that the row's input gets; a list if the checks of a run tell several, or none."""
    problems: list[str] = []

    def check() -> None:
        if "moe" in row:
            check_parts(parse_config({"moe": row["moe"]}).moe, row.get("expert_parallel", 1))
            return
        config, ranks = tiny(*row["overrides"]), row.get("ranks", 1)
        problems.extend(str(each) for each in validate(config, ranks, resolve_parallel(config, ranks)))

    return told(check) or (problems[0] if len(problems) == 1 else problems)


def told(action: Callable[[], object], folder: Path | None = None) -> str | list[str]:
    """The message of the UserError, or its lines, with FOLDER for `folder`; [] if nothing is refused."""
    try:
        action()
    except UserError as error:
        lines = [str(UserError(line)) for line in error.args]
        if folder is not None:
            lines = [line.replace(str(folder), "FOLDER") for line in lines]
        return lines[0] if len(lines) == 1 else lines
    return []
