"""The list of published pages: which studies were run, at what size, and what their claims came to."""

from pathlib import Path

from megamoe.apps.lab.page import PAGE, RESULTS, SIGNS, markdown_table
from megamoe.apps.lab.study import load_study
from megamoe.errors import UserError
from megamoe.io import read_json, reason, replace_file

LARGEST = 1 << 28  # bytes of a page's results
HEAD = """# Results of the studies

For readers of the papers: which claims of [the studies](../lab.md) were run, on what, and what they came to.
`python tools/lab.py --index docs/lab` writes this page.

## Run
"""
MISSING = """## Not run yet

Of these no result is known: the size `smoke` shows that a study runs, and decides nothing. The time is the
planned one of size `cpu`.
"""

NEXT = "Next: [lab.md](../lab.md) for what a verdict means and how to run a study."


def write_index(folder: Path, studies: list[Path]) -> Path:
    """Write index.md of a folder of published pages; return it. studies: the YAML of all studies.

    Raises:
        UserError: if a results.json cannot be read, or the page cannot be written.
    """
    run, missing = [["study", "size", "date", "claim", "verdict"]], [["study", "title", "time"]]
    for path in studies:
        name, study = path.stem, load_study(path)
        try:
            found = read_json(folder / name / RESULTS, LARGEST)
            first = [f"[{name}]({name}/{PAGE})", f"{found['size']}, {len(found['seeds'])} seeds"]
            first.append(found["made"]["date"])
            for claim in found["claims"]:
                run.append([*first, claim["text"], SIGNS[claim["verdict"]]])
                first = ["", "", ""]
        except FileNotFoundError:
            missing.append(
                [f"`{name}`", study.title, study.sizes["cpu"].time if "cpu" in study.sizes else ""]
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder / name / RESULTS}: no results of a study: {reason(error)}") from None
    text = f"{HEAD}\n{markdown_table(run)}\n"
    text += f"\n{MISSING}\n{markdown_table(missing)}\n" if len(missing) > 1 else ""
    try:
        replace_file(folder / PAGE, f"{text}\n{NEXT}\n".encode())
    except OSError as error:
        raise UserError(f"--index: {folder} cannot be written: {error.strerror}") from None
    return folder / PAGE
