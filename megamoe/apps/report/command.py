"""Make the report of each run folder; with two or more, also a page that compares them.

python tools/report.py runs/first runs/second
python tools/report.py runs/first --live
"""

import argparse
import io
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from megamoe.apps.command import check_writable, parser_of
from megamoe.apps.report.live import LiveServer
from megamoe.apps.report.page import REPORT_FILE, write_page, write_report
from megamoe.apps.report.run_statistics import comparison_table, read_run
from megamoe.errors import UserError
from megamoe.io import real

COMPARISON_FILE = "comparison.html"
DEFAULT_PORT = 8765


def main(arguments: list[str] | None = None) -> int:
    """Write the reports and print where they are; 2 for a user's mistake, and then nothing is written."""
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of folders may be any bytes
    try:
        folders = list({os.path.realpath(folder): folder for folder in options.run_folders}.values())
        _check_options(options, len(folders))
        if options.live:
            _serve(folders, DEFAULT_PORT if options.port is None else options.port, options.token)
        else:
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
    add("--live", action="store_true", help="serve the page to this machine and refresh it; write nothing")
    add("--port", type=_port, metavar="N", help=f"of --live; 0: any free one; default: {DEFAULT_PORT}")
    add("--token", action="store_true", help="of --live: a random token in the address, unknown to others")
    return parser


def _port(text: str) -> int:
    port = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= port < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is no port, expected a number from 0 to 65535")
    return port


def _check_options(options: argparse.Namespace, runs: int) -> None:
    """Refuse options without effect, and a page that is no HTML file.

    Raises:
        UserError: naming the option.
    """
    output = options.output
    if options.port is not None and not options.live:
        raise UserError(f"--port: found {options.port} without --live; add --live, or leave out --port")
    if options.token and not options.live:
        raise UserError("--token: found without --live; add --live, or leave out --token")
    if output is None:
        return
    if options.live:
        raise UserError(
            f"--output: found {output} beside --live, which writes nothing; leave out one of them"
        )
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


def _serve(folders: list[Path], port: int, with_token: bool) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell's background processes lack it
        signal.signal(number, signal.default_int_handler)
    with LiveServer(folders, port, with_token=with_token) as server, suppress(KeyboardInterrupt):
        print(f"{server.url} (Ctrl+C ends it)", flush=True)
        server.serve_forever()
