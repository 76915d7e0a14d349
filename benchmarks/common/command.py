"""The command lines of the benchmarks."""

import argparse
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megamoe.errors import UserError


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"found {number}, expected at least 1")
    return number


def names_of(option: str, text: str | None, known: Collection[str]) -> list[str]:
    """Return the names of `a,b`; without a text all. UserError for one that is not known."""
    names = list(known) if text is None else text.split(",")
    for name in names:
        if name not in known:
            raise UserError(f"{option}: found {name!r}, expected some of {', '.join(known)}")
    return names


def write_json(path: str | None, data: Any) -> None:
    """Write the file of --json as a whole, if it is given; UserError if that fails."""
    if path:
        try:
            Path(path).write_text(json.dumps(data, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"--json: {path} cannot be written: {error.strerror}") from error


@contextmanager
def user_errors_exit_2(parser: argparse.ArgumentParser) -> Iterator[None]:
    """End with one line and exit code 2 at a user's mistake."""
    try:
        yield
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
