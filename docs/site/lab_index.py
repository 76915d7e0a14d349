"""Writes docs/lab/index.md: which studies were run, at what size, and what their claims came to.

It also judges the claims of each study anew, by the values in its results.json, and writes that file and the
study's page. The page names the rows that had another configuration than they have now.

python docs/site/lab_index.py
"""

import contextlib
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megamoe.apps.lab.command import plan_of  # noqa: E402
from megamoe.apps.lab.page import PAGE, RESULTS, markdown, markdown_table, shown_verdict  # noqa: E402
from megamoe.apps.lab.results import changed_rows, decided, stored_values  # noqa: E402
from megamoe.apps.lab.study import load_study  # noqa: E402
from megamoe.apps.lab.verdicts import DECIDED  # noqa: E402

FOLDER, STUDIES = ROOT / "docs/lab", sorted((ROOT / "examples/studies").glob("*.yaml"))
HEAD = """# Results of the studies

Which claims of [the studies](../papers/studies.md) were run, on what, and what they came to. Beside an
undecided one stands how many seeds more decide it in 80 % of cases, if mean and spread are the true ones.
`python docs/site/lab_index.py` writes this page.

## Run
"""
MISSING = """## Not run yet

Of these no result is known: the size `smoke` shows that a study runs, and decides nothing. The time is the
planned one of size `cpu`.
"""
FORMER = "**Of a former configuration:** since this run the configuration has changed of the rows "
NEXT = "Next: [studies.md](../papers/studies.md) for what a verdict means and how to run a study."


def judged(folder: Path) -> tuple[dict[str, Any], str, bool]:
    """Return the results of a study with its claims judged anew, its page, and whether a row has changed."""
    results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    with contextlib.chdir(ROOT):  # the study may have further rows since
        plan = plan_of(f"{results['made']['command']} --rows {','.join(results['rows'])}")
        changed = changed_rows(plan, results)
    size = replace(plan.size, seeds=results["seeds"])
    differences = {row: [] if row in changed else texts for row, texts in plan.differences.items()}
    plan = replace(plan, size=size, differences=differences)
    results["claims"] = decided(plan, stored_values(results))
    page = markdown(plan, results, sorted(path.name for path in folder.glob("*.svg")))
    if changed:
        page = page.replace("\n\n", f"\n\n{FORMER}{', '.join(changed)}.\n\n", 1)
    return results, page, bool(changed)


def pages() -> dict[Path, str]:
    """Return the index and the pages of studies by file, from the results in docs/lab."""
    verdicts: Counter[str] = Counter()
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
        found, written[FOLDER / name / PAGE], has_changed = judged(FOLDER / name)
        written[results] = json.dumps(found, indent=1) + "\n"
        first = [f"[{name}]({name}/{PAGE})", f"{found['size']}, {len(found['seeds'])} seeds"]
        first.append(found["made"]["date"] + ", of a former configuration" * has_changed)
        verdicts.update(claim["verdict"] for claim in found["claims"])
        for claim in found["claims"]:
            run.append([*first, claim["text"], shown_verdict(claim["verdict"], claim["comparisons"])])
            first = ["", "", ""]
    counts = ", ".join(f"{verdicts[each]} {each}" for each in (*DECIDED, "undecided"))
    text = f"{HEAD}\nOf {verdicts.total()} claims: {counts}.\n\n{markdown_table(run)}\n"
    text += f"\n{MISSING}\n{markdown_table(missing)}\n" if len(missing) > 1 else ""
    return {FOLDER / PAGE: f"{text}\n{NEXT}\n", **written}


if __name__ == "__main__":
    for file, content in pages().items():
        file.write_text(content, encoding="utf-8")
