"""Writes docs/lab/index.md: which studies were run, at what size, and what their claims came to.

It also writes a line into the page of a study of which rows had another configuration than they have now.

python docs/site/lab_index.py
"""

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megamoe.apps.lab.command import plan_of  # noqa: E402
from megamoe.apps.lab.page import PAGE, RESULTS, markdown_table, shown_verdict  # noqa: E402
from megamoe.apps.lab.results import changed_rows  # noqa: E402
from megamoe.apps.lab.study import load_study  # noqa: E402

FOLDER, STUDIES = ROOT / "docs/lab", sorted((ROOT / "examples/studies").glob("*.yaml"))
HEAD = """# Results of the studies

Which claims of [the studies](../papers/studies.md) were run, on what, and what they came to.
`python docs/site/lab_index.py` writes this page.

## Run
"""
MISSING = """## Not run yet

Of these no result is known: the size `smoke` shows that a study runs, and decides nothing. The time is the
planned one of size `cpu`.
"""
FORMER = "**Of a former configuration:** since this run the configuration has changed of the rows "
NEXT = "Next: [studies.md](../papers/studies.md) for what a verdict means and how to run a study."


def changed(results: dict[str, Any]) -> str:
    """Return the rows of results whose configuration has changed since, with commas."""
    with contextlib.chdir(ROOT):
        return ", ".join(changed_rows(plan_of(results["made"]["command"]), results))


def noted(page: str, rows: str) -> str:
    """Return the page of a study with a line below its title that names the rows, or without it."""
    page = re.sub(f"^{re.escape(FORMER)}.*\n\n", "", page, flags=re.MULTILINE)
    return page.replace("\n\n", f"\n\n{FORMER}{rows}.\n\n", 1) if rows else page


def pages() -> dict[Path, str]:
    """Return the index and the pages of studies by file, from the results in docs/lab."""
    run, missing = [["study", "size", "date", "claim", "verdict"]], [["study", "title", "time"]]
    written: dict[Path, str] = {}
    for path in STUDIES:
        name, study = path.stem, load_study(path)
        results = FOLDER / name / RESULTS
        if not results.exists():
            missing.append(
                [f"`{name}`", study.title, study.sizes["cpu"].time if "cpu" in study.sizes else ""]
            )
            continue
        found = json.loads(results.read_text(encoding="utf-8"))
        first = [f"[{name}]({name}/{PAGE})", f"{found['size']}, {len(found['seeds'])} seeds"]
        rows, page = changed(found), results.with_name(PAGE)
        written[page] = noted(page.read_text(encoding="utf-8"), rows)
        first.append(found["made"]["date"] + ", of a former configuration" * bool(rows))
        for claim in found["claims"]:
            run.append([*first, claim["text"], shown_verdict(claim["verdict"])])
            first = ["", "", ""]
    text = f"{HEAD}\n{markdown_table(run)}\n"
    text += f"\n{MISSING}\n{markdown_table(missing)}\n" if len(missing) > 1 else ""
    return {FOLDER / PAGE: f"{text}\n{NEXT}\n", **written}


if __name__ == "__main__":
    for file, content in pages().items():
        file.write_text(content, encoding="utf-8")
