"""The defects with their tests, as rows of docs/change/conformance.md.

python -m tests.conformance.listed        # prints the two tables
"""

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPORTED = "Reported: "
NO_NUMBER = "no public number was verified"
SECOND_LIST = ("test_attention.py", "test_parallel.py", "test_routing.py")


@dataclass(frozen=True)
class Listed:
    """name, file: of the test. defect: in words. modules, edits: where it is planted, and how.

    reports: `owner/name#n`.
    """

    name: str
    file: str
    defect: str
    modules: tuple[str, ...]
    reports: tuple[str, ...]
    edits: tuple[Any, ...]

    def row(self) -> str:
        """Return the row of the table."""
        planted = ", ".join(f"`{module}`" for module in self.modules)
        links = ", ".join(
            f"[{report}](https://github.com/{report.replace('#', '/issues/')})" for report in self.reports
        )
        test = f"[`{self.name}`](../../tests/conformance/{self.file})"
        return f"| {self.defect} | {test} | {planted} | {links or NO_NUMBER} |"


def listed() -> Iterator[Listed]:
    """Yield every test that has a defect, in the order of the files.

    Raises:
        ValueError: if a docstring does not end with its reports, or with NO_NUMBER.
    """
    for path in sorted(HERE.glob("test_*.py")):
        module = importlib.import_module(f"tests.conformance.{path.stem}")
        for name, function in vars(module).items():
            edits = _edits(function) if inspect.isfunction(function) else ()
            if edits:
                text, _, reports = (inspect.getdoc(function) or "").partition(REPORTED)
                if not reports:
                    raise ValueError(f"{name}: expected a docstring that ends with {REPORTED!r} and numbers")
                numbers = () if reports == NO_NUMBER else tuple(reports.split(", "))
                modules = tuple(dict.fromkeys(edit.module for edit in edits))
                yield Listed(name, path.name, " ".join(text.split()), modules, numbers, edits)


def _edits(function: Any) -> tuple[Any, ...]:
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == "parametrize" and mark.args[0] == "defect":
            edits: tuple[Any, ...] = mark.args[1][1].values[0]
            return edits
    return ()


if __name__ == "__main__":
    for is_second in (False, True):
        print("\n| defect | our test | planted in | public reports |\n|---|---|---|---|")
        for each in listed():
            if (each.file in SECOND_LIST) == is_second:
                print(each.row())
