"""Make the report of each run folder; with two or more, also a page that compares them.

python tools/report.py runs/first runs/second
python tools/report.py runs/first --live
"""

import argparse
import io
import sys
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.errors import UserError
from megamoe.metrics.report.live import LiveServer
from megamoe.metrics.report.page import write_comparison, write_report
from megamoe.metrics.report.run_statistics import comparison_table, read_run

COMPARISON_FILE = "comparison.html"


def main(arguments: list[str] | None = None) -> int:
    """Write the reports and print where they are; 2 for a user's mistake, and then nothing is written."""
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of folders may be any bytes
    try:
        if options.live:
            _serve(options.run_folders, options.port)
        else:
            _write(options.run_folders, options.output)
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "run_folders", nargs="+", type=Path, metavar="RUN_FOLDER", help="a run's folder, runs/<name>"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"the page that compares runs; default: {COMPARISON_FILE} beside the first run's folder",
    )
    parser.add_argument(
        "--live", action="store_true", help="serve the page to this machine and refresh it; write nothing"
    )
    parser.add_argument(
        "--port", type=_port, default=8765, help="of --live on 127.0.0.1; 0: any free one; default: 8765"
    )
    return parser


def _port(text: str) -> int:
    port = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= port < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is no port, expected a number from 0 to 65535")
    return port


def _write(folders: list[Path], output: Path | None) -> None:
    runs = [read_run(folder) for folder in folders]
    for folder in folders:
        print(write_report(folder))
    if len(runs) > 1:
        print(write_comparison(runs, output or folders[0].resolve().parent / COMPARISON_FILE))
        print(f"\n{comparison_table(runs)}")


def _serve(folders: list[Path], port: int) -> None:
    with LiveServer(folders, port) as server, suppress(KeyboardInterrupt):
        print(f"{server.url} (Ctrl+C ends it)", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
