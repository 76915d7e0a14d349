"""The command lines of the benchmarks."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megamoe.errors import UserError

DEMO = Path(__file__).parents[2] / "examples/demo.yaml"


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a script's docstring as it stands."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parser_of_a_run(description: str | None, rounds: int | None) -> argparse.ArgumentParser:
    """For a benchmark of training: --config, --rounds (by default so many) and overrides."""
    parser = parser_of(description)
    parser.add_argument("--config", default=str(DEMO))
    parser.add_argument("--rounds", type=positive, default=rounds)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"found {number}, expected at least 1")
    return number


@contextmanager
def user_errors_exit_2(parser: argparse.ArgumentParser) -> Iterator[None]:
    """End with one line and exit code 2 at a user's mistake."""
    try:
        yield
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
