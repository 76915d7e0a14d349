"""Show on one screen how a run is, from the files in its folder alone.

python tools/status.py runs/demo
python tools/status.py runs/demo --watch
python tools/status.py --config examples/demo.yaml name=first

Any machine that has the folder can do it. Exit code: 0 if the run is running or has ended as intended, 1 if
it hangs, failed or crashed, 2 for a mistake. --watch goes on until the last step is done or Ctrl-C: a run
that has stopped or failed may be started again.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from megamoe.apps.cluster.status import as_text, is_complete, newest_checkpoint, read_status
from megamoe.apps.command import parser_of, run_plain
from megamoe.compat.startup import configure_libraries
from megamoe.config import load_config
from megamoe.errors import UserError

LONGEST_S = 86400
CLEAR = "\033[H\033[2J"


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("run", nargs="*", metavar="RUN", help="the run's folder; with --config: overrides")
    add("--config", help="the run's YAML, in place of its folder")
    add("--watch", action="store_true", help="show it anew every few seconds")
    add("--every", type=float, default=10.0, metavar="S", help="seconds between two (default 10)")
    add("--json", action="store_true", help="as JSON, with --watch a line each")
    newest = "print only the newest checkpoint and the time of its saving in ns, `none`, or `complete`"
    add("--checkpoint", action="store_true", help=newest)
    options = parser.parse_intermixed_args(arguments)
    return run_plain(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    folder, steps = _folder_and_steps(options)
    if options.checkpoint:
        print("complete" if is_complete(folder, steps) else newest_checkpoint(folder))
        return 0
    if not 0 < options.every <= LONGEST_S:
        raise UserError(
            f"--every: found {options.every:g}, expected seconds, above 0 and at most {LONGEST_S}"
        )
    while True:
        report = read_status(folder)
        if options.json:
            print(json.dumps(asdict(report), default=str, indent=None if options.watch else 1), flush=True)
        elif options.watch:
            print(f"{CLEAR if sys.stdout.isatty() else ''}{as_text(report)}\n", flush=True)
        else:
            print(as_text(report))
        if not options.watch or report.verdict == "finished":
            return 0 if report.is_well else 1
        time.sleep(options.every)


def _folder_and_steps(options: argparse.Namespace) -> tuple[Path, int | None]:
    """Return the run's folder, and the configuration's steps; None without one, and if it has epochs."""
    if options.config is not None:
        configure_libraries()  # plugins may import the vendors
        config = load_config(options.config, options.run)
        return Path(config.output) / config.name, config.train.steps
    if len(options.run) != 1:
        raise UserError(f"RUN: found {len(options.run)} arguments, expected one folder, such as runs/demo")
    return Path(options.run[0]), None
