"""Writes docs/lab/index.md: which studies were run, at what size, and what their claims came to.

python docs/site/lab_index.py
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megamoe.apps.lab.page import PAGE, RESULTS, markdown_table  # noqa: E402
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
NEXT = "Next: [studies.md](../papers/studies.md) for what a verdict means and how to run a study."


def index() -> str:
    """Return the page, from the results in docs/lab."""
    run, missing = [["study", "size", "date", "claim", "verdict"]], [["study", "title", "time"]]
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
        first.append(found["made"]["date"])
        for claim in found["claims"]:
            run.append([*first, claim["text"], claim["verdict"].replace("not seen", "**not seen**")])
            first = ["", "", ""]
    text = f"{HEAD}\n{markdown_table(run)}\n"
    text += f"\n{MISSING}\n{markdown_table(missing)}\n" if len(missing) > 1 else ""
    return f"{text}\n{NEXT}\n"


if __name__ == "__main__":
    (FOLDER / PAGE).write_text(index(), encoding="utf-8")
