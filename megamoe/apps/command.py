"""What the commands of the applications share: their start and end, their files, and the option `--data
NAME=PREFIX`.
"""

import argparse
import errno
import io
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megamoe.compat.startup import check_versions, configure_libraries
from megamoe.errors import ExitCode, UserError
from megamoe.io import read_json, read_plain, reason, replace_file
from megamoe.resilience.error_reporting import report_error

# By these a process takes itself for one rank of several.
LAUNCHER = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
)
CLOSED_PIPE = 141  # as shells say it of SIGPIPE
STDIN = Path("-")  # the standard input, where a command reads lines
# A terminal would obey control characters; files have them.
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a script's docstring as it stands."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=raw)


def add_verb(verbs: Any, name: str, text: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """Add a command with verbs another one; return what adds its arguments. work: gets all of them."""
    verb = verbs.add_parser(name, help=text)
    verb.set_defaults(work=work)
    return verb.add_argument


def model_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command on a checkpoint, with overrides and the rank that launchers may pass."""
    parser = parser_of(description)
    add = parser.add_argument
    add("path", type=Path, help="a step_* folder, or a run's")
    add("--precision", choices=("fp32", "bf16", "fp16"), help="default: as trained")
    add("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    add("overrides", nargs="*", metavar="section.key=value", help="overrides of the saved YAML")
    return parser


def run_tool(work: Callable[[], None]) -> int:
    """Check and settle the vendors' libraries and do the work; return the exit code.

    An error of the work becomes a line on standard error; 2: a user's mistake; 130: interrupted by Ctrl-C.
    """
    try:
        check_versions()
        configure_libraries()
        work()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return ExitCode.INTERRUPTED
    except (Exception, SystemExit) as error:
        return report_error(error)
    return 0


def run_plain(work: Callable[[], int | None]) -> int:
    """Do the work of a command that needs neither ranks nor the vendors' settings; return its exit code.

    2: a user's mistake, or a file that cannot be read or written; 130: interrupted by Ctrl-C; 141: the reader
    of its output, such as head, has gone.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files may be any bytes
    try:
        code = work()
        sys.stdout.flush()
        return code or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the last flush must not fail again
        return CLOSED_PIPE
    except OSError as error:
        print(f"error: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    return ExitCode.MISTAKE


def json_of(option: str, path: Path, largest: int) -> Any:
    """Return what a JSON file of at most `largest` bytes says.

    Raises:
        UserError: beginning with the option, if it cannot be read.
    """
    try:
        return read_json(path, largest)
    except (OSError, ValueError) as error:
        raise UserError(f"{option}: {path}: {reason(error)}; expected JSON") from None


def lines_of(option: str, path: Path, largest: int) -> list[str]:
    """Return the lines of a text file of at most `largest` bytes, or of the standard input for the path `-`.

    Only a line feed ends a line.

    Raises:
        UserError: beginning with the option, if it is no text in UTF-8 that can be read.
    """
    try:
        content = sys.stdin.buffer.read(largest + 1) if path == STDIN else read_plain(path, largest)
        if len(content) > largest:
            raise ValueError(f"larger than {largest:,} bytes")
        text = content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"{option}: {path}: {reason(error)}; expected a text file in UTF-8") from None
    return [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")]


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text: the first column on the left, the others on the right of their columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


def check_positive(option: str, value: int | None) -> None:
    """Check a number that a user may give.

    Raises:
        UserError: if it is 0 or less.
    """
    if value is not None and value < 1:
        raise UserError(f"{option}: found {value}, expected at least 1")


def check_options(options: argparse.Namespace, *names: str) -> None:
    """Check options of a command, by their names in it: numbers are positive, files can be written.

    Raises:
        UserError: as `check_positive` and `check_writable`.
    """
    for name in names:
        option, value = f"--{name.replace('_', '-')}", getattr(options, name)
        if isinstance(value, Path):
            check_writable(option, value)
        else:
            check_positive(option, value)


def check_writable(option: str, path: Path | None) -> None:
    """Check before long work that its result can be written to a file; the file is not touched.

    Raises:
        UserError: if there is no folder for it, if it is a folder, or if the permissions forbid it.
    """
    if path is None:
        return
    folder, problem = path.parent, 0
    if not folder.is_dir():
        problem = errno.ENOTDIR if folder.exists() else errno.ENOENT
    elif path.is_dir():
        problem = errno.EISDIR
    elif not os.access(folder if _is_replaced(path) else path, os.W_OK):
        problem = errno.EACCES
    if problem:
        raise _unwritable(option, path, os.strerror(problem))


def write_text(option: str, path: Path, text: str) -> None:
    """Write a result. A plain file is replaced in one move; a link, pipe or device is written through.

    Raises:
        UserError: if the file cannot be written.
    """
    try:
        if _is_replaced(path):
            replace_file(path, text.encode())
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(option, path, error.strerror) from error


def _is_replaced(path: Path) -> bool:
    """Whether `write_text` moves a new file to this path."""
    return not path.is_symlink() and (path.is_file() or not path.exists())


def _unwritable(option: str, path: Path, problem: str | None) -> UserError:
    return UserError(f"{option}: {path} cannot be written: {problem}; name a file in a folder that exists")


def run_preparation(work: Callable[[], None]) -> int:
    """As `run_tool`, for what prepares data: a signal to end is Ctrl-C, and leaves nothing behind."""
    # Megatron-Core warns of accelerators and ranks, which preparing data has no use for.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return run_tool(work)


def data_overrides(given: list[str]) -> list[str]:
    """Return the overrides that make prepared data the validation sets, by name; none for no data.

    given: NAME=PREFIX each; data of one name are blended.

    Raises:
        UserError: if one has another form.
    """
    if not given:
        return []
    sets: dict[str, list[str]] = {}
    for each in given:
        name, equals, prefix = each.partition("=")
        if not (name and equals and prefix):
            raise UserError(f"--data: found {each!r}, expected NAME=PREFIX, such as books=data/books/books")
        sets.setdefault(name, []).append(prefix)
    first = next(iter(sets.values()))
    return [
        "data.mock=false",
        f"data.sources={json.dumps(first)}",
        f"data.validation={json.dumps(sets)}",
        "data.split=[1, 0, 0]",
    ]
