"""Where a study of routing is written: one JSON file, a PNG for each analysis, and the tables of tokens."""

import json
from pathlib import Path
from typing import Any

from megamoe.analysis.routing.figures import figures_of
from megamoe.plain_files import replace_file

RESULTS = "routing.json"
TABLES = "tokens.txt"


def write_study(folder: Path, results: dict[str, Any]) -> list[Path]:
    """Write the files into a folder; return them. Each is replaced in one move.

    Raises:
        OSError: if one cannot be written.
    """
    contents = {RESULTS: (json.dumps(results, allow_nan=False) + "\n").encode()}
    if tables := token_tables(results):
        contents[TABLES] = tables.encode(errors="backslashreplace")
    contents |= {f"{name}.png": png for name, png in figures_of(results).items()}
    for name, content in contents.items():
        replace_file(folder / name, content)
    return [folder / name for name in contents]


def token_tables(results: dict[str, Any]) -> str:
    """Return the tokens of every expert as text; empty if the study has none."""
    lines: list[str] = []
    for checkpoint in results["checkpoints"]:
        for number, found in checkpoint["analyses"].get("tokens", {}).items():
            lines.append(f"{checkpoint['run']}, step {checkpoint['step']}, layer {number}")
            for expert, rows in enumerate(found["experts"]):
                lines.append(f"  expert {expert}" + ("" if rows else ": no token"))
                lines += [_line(row) for row in rows]
    return "".join(f"{line}\n" for line in lines)


def _line(row: dict[str, Any]) -> str:
    token = row["token"] if row["text"] is None else repr(row["text"])
    share = 100 * row["of_token"]
    example = repr(row["examples"][0]) if row["examples"] else ""
    return f"    {token!s:<16} {row['count']:>6} tokens, {share:5.1f} % of this one   {example}"
