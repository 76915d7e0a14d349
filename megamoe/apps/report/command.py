"""Make the report of each run folder; with two or more, also a page that compares them.

python tools/report.py runs/first runs/second
"""

import argparse
import io
import os
import sys
from pathlib import Path

from megamoe.apps.command import check_writable, parser_of
from megamoe.apps.report.page import REPORT_FILE, write_page, write_report
from megamoe.apps.report.run_statistics import comparison_table, read_run
from megamoe.errors import UserError
from megamoe.io import real

COMPARISON_FILE = "comparison.html"


def main(arguments: list[str] | None = None) -> int:
    """Write the reports and print where they are; 2 for a user's mistake, and then nothing is written."""
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of folders may be any bytes
    try:
        folders = list({os.path.realpath(folder): folder for folder in options.run_folders}.values())
        _check_output(options.output, len(folders))
        _write(folders, options.output)
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add, beside = parser.add_argument, f"{COMPARISON_FILE} beside the first run's folder"
    add("run_folders", nargs="+", type=Path, metavar="RUN_FOLDER", help="a run's folder, runs/<name>")
    add("--output", type=Path, metavar="FILE", help=f"the page that compares runs; default: {beside}")
    return parser


def _check_output(output: Path | None, runs: int) -> None:
    """Refuse a page without effect, and one that is no HTML file.

    Raises:
        UserError: naming the option.
    """
    if output is None:
        return
    if runs == 1:
        raise UserError(
            f"--output: {output} is for the page that compares runs, but one run is named; name another run, "
            f"or leave out --output: the report of a run is {REPORT_FILE} in its folder"
        )
    if output.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--output: found {output}, expected a name that ends in .html or .htm")


def _write(folders: list[Path], output: Path | None) -> None:
    runs = [read_run(folder) for folder in folders]
    page = output or real(folders[0]).parent / COMPARISON_FILE
    for folder in folders:
        if not os.access(folder, os.W_OK):
            raise UserError(f"{folder}: the report cannot be written into it; make it writable")
    if len(runs) > 1:
        check_writable("--output", page)
    for folder in folders:
        print(write_report(folder))
    if len(runs) > 1:
        print(write_page(runs, page))
        print(f"\n{comparison_table(runs)}")
