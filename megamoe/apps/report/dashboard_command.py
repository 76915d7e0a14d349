"""Make the W&B workspace of a project, and with --compare a report that sets runs beside each other.

python tools/wandb_dashboard.py --project megamoe --group-by layout,seed --compare first,second

Without a login nothing is sent: the tool writes what it would make to a file.
"""

import argparse
import json
import sys
from pathlib import Path

from megamoe.apps.report.dashboard import GROUPS, SECTIONS, Dashboard, own_entity, spec_of
from megamoe.errors import UserError
from megamoe.metrics.sinks.wandb_sink import has_login


def main(arguments: list[str] | None = None) -> int:
    """Make them, or write their specification; 2 for a user's mistake."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--project", default="megamoe", help="as log.wandb.project")
    parser.add_argument("--entity", default="", help="a W&B user or team; default: the login's own")
    parser.add_argument("--group-by", default="", help=f"of {', '.join(GROUPS)}, separated by commas")
    parser.add_argument("--compare", default="", help="names of runs, separated by commas")
    parser.add_argument("--output", type=Path, default=Path("wandb_dashboard.json"))
    parser.add_argument("--dry-run", action="store_true", help="write the file even with a login")
    asked = parser.parse_args(arguments)
    try:
        make(asked)
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --output: {asked.output}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def make(asked: argparse.Namespace) -> None:
    """Send the workspace and the report to W&B, or write them to the file.

    Raises:
        UserError: for a wrong option, a missing package, or if W&B refuses.
        OSError: if the file cannot be written.
    """
    group_by, runs = _names(asked.group_by), _names(asked.compare)
    unknown = [key for key in group_by if key not in GROUPS]
    if unknown:
        raise UserError(f"--group-by: {unknown[0]!r} is none of {', '.join(GROUPS)}")
    if asked.compare and len(runs) < 2:
        raise UserError(f"--compare: {asked.compare!r} names {len(runs)} run; name at least two")
    sends = has_login() and not asked.dry_run
    dashboard = Dashboard(asked.project, asked.entity or (own_entity() if sends else ""), group_by)
    made = {"workspace": dashboard.workspace()}
    if runs:
        made["report"] = dashboard.report(runs)
    if not sends:
        spec = {name: spec_of(each) for name, each in made.items()}
        asked.output.write_text(json.dumps(spec, indent=1) + "\n", encoding="utf-8")
        panels = ", ".join(f"{name} {len(charts)}" for name, charts in SECTIONS.items())
        why = "--dry-run" if asked.dry_run else "nobody is logged in to W&B (`wandb login`)"
        print(f"{why}; would make in the project {asked.project}: {' and '.join(made)}")
        print(f"charts: {panels}")
        print(f"written: {asked.output}")
        return
    for name, each in made.items():
        try:
            each.save()
            print(f"{name}: {each.url}")
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            raise UserError(f"W&B did not take the {name} ({type(error).__name__}: {first_line})") from error


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
