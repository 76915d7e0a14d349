"""Make the report of each run folder; with two or more, also a page that compares them.

python tools/report.py runs/first runs/second
"""

import argparse
import os
from pathlib import Path

from megamoe.apps.command import check_writable, parser_of, run_plain
from megamoe.apps.report.page import REPORT_FILE, write_page, write_report
from megamoe.apps.report.run_statistics import comparison_table, read_run
from megamoe.errors import UserError
from megamoe.io import real

COMPARISON_FILE = "comparison.html"


def main(arguments: list[str] | None = None) -> int:
    """Write the reports and print where they are; 2 for a user's mistake, and then nothing is written."""
    parser = parser_of(__doc__)
    add, beside = parser.add_argument, f"{COMPARISON_FILE} beside the first run's folder"
    add("run_folders", nargs="+", type=Path, metavar="RUN_FOLDER", help="a run's folder, runs/<name>")
    add("--output", type=Path, metavar="FILE", help=f"the page that compares runs; default: {beside}")
    options = parser.parse_args(arguments)
    return run_plain(lambda: _write(options))


def _write(options: argparse.Namespace) -> None:
    folders = list({os.path.realpath(folder): folder for folder in options.run_folders}.values())
    if options.output is not None and len(folders) == 1:
        raise UserError(
            f"--output: {options.output} is for the page that compares runs, but one run is named; name "
            f"another run, or leave out --output: the report of a run is {REPORT_FILE} in its folder"
        )
    page = options.output or real(folders[0]).parent / COMPARISON_FILE
    if page.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--output: found {page}, expected a name that ends in .html or .htm")
    runs = [read_run(folder) for folder in folders]
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
