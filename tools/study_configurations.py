"""Write the YAML of each run of a published study again, with the tuned values of its results; train nothing.

python tools/study_configurations.py docs/lab/tournament/results.json configurations

Rows whose configuration has changed since the study ran are named, and the exit code is 1 then.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.apps.command import parser_of, run_plain
from megamoe.apps.lab.command import LARGEST_FILE, plan_of
from megamoe.apps.lab.results import changed_rows
from megamoe.apps.lab.tasks import study_tasks, tuning_tasks
from megamoe.errors import UserError
from megamoe.io import read_plain, reason, replace_file


def main(arguments: list[str] | None = None) -> int:
    """Write the files; return the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("results", type=Path, metavar="RESULTS", help="the results.json of a study")
    parser.add_argument("output", type=Path, metavar="FOLDER", help="the folder for the files")
    options = parser.parse_args(arguments)
    return run_plain(lambda: _write(options))


def _write(options: argparse.Namespace) -> int:
    try:
        results = json.loads(read_plain(options.results, LARGEST_FILE))
        plan = plan_of(f"{results['made']['command']} --rows {','.join(results['rows'])}")
        tuned = {row: known["tuned"] for row, known in results["rows"].items() if "tuned" in known}
        changed = changed_rows(plan, results)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{options.results}: no results.json of a study with digests: {reason(error)}"
        ) from None
    without = [] if plan.size.tuning is None else [row for row in plan.configs if row not in tuned]
    tasks = [*tuning_tasks(plan, options.output)[0].by_name.values()]
    tasks += study_tasks(plan, options.output, tuned, without).by_name.values()
    files = dict(filter(None, (task.configuration for task in tasks)))
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, text.encode())
    print(f"written: {len(files)} configurations in {options.output / 'configurations'}")
    for row in changed:
        print(f"{row}: not the configuration of the results: the study or its examples have changed since")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
