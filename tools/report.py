"""Make the report of each run folder; with two or more, set the runs side by side as well.

python tools/report.py runs/first runs/second
"""

import argparse
import io
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.errors import UserError
from megamoe.metrics.report.page import write_report
from megamoe.metrics.report.run_statistics import comparison_table, read_run


def main(arguments: list[str] | None = None) -> int:
    """Write the reports and print where they are; 2 for a user's mistake, and then nothing is written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "run_folders", nargs="+", type=Path, metavar="RUN_FOLDER", help="a run's folder, runs/<name>"
    )
    folders = parser.parse_args(arguments).run_folders
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of folders may be any bytes
    try:
        runs = [read_run(folder) for folder in folders]
        for folder in folders:
            print(write_report(folder))
        if len(runs) > 1:
            print(f"\n{comparison_table(runs)}")
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
