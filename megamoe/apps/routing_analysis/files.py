"""Where a study of routing is written: JSON, a PNG for each analysis, tables of tokens, and the lines of a
summary.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megamoe.apps.routing_analysis.figures import figures_of
from megamoe.io import replace_file

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


def _number(value: float | None, pattern: str = "{:.4f}") -> str:
    return "none" if value is None else pattern.format(value)


# (found of one layer) -> its number, for the analyses of one checkpoint
_NUMBERS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "collapse": ("representation collapse RC", _number),
    "required": (
        "required experts",
        lambda found: ", ".join(f"{row['mean']:.3f} for {key}" for key, row in found.items()),
    ),
    "load": (
        "distance of loads in training and inference",
        lambda found: _number(100 * found["distance"], "{:.2f} %"),
    ),
    "tokens": (
        "mutual information with the token, bits",
        lambda found: f"{found['mutual_information']:.4f} (shuffled {found['chance']:.4f})",
    ),
    "coactivation": ("largest lift of two experts", lambda found: _number(found["max_lift"], "{:.3f}")),
    "map": ("map", lambda found: f"{found['method']}, {len(found['first_S'])} tokens"),
}


def summary_lines(results: dict[str, Any]) -> Iterator[str]:
    """Yield lines of text: each checkpoint's numbers by layer, then the comparisons."""
    for row in results["checkpoints"]:
        yield f"{row['run']}, step {row['step']}: loss {row['lm_loss']:.6f}, {row['tokens']:,} tokens"
        for name, found in row["analyses"].items():
            yield from _of_checkpoint(name, found)
    for row in results["comparisons"].get("fluctuation", ()):
        yield f"fluctuation, {row['earlier']} to {row['later']}"
        for number, found in row["layers"].items():
            yield f"  layer {number}: {100 * found['first']:.2f} % of the first choices changed"
    if found := results["comparisons"].get("consistency"):
        yield f"inter-run consistency of {len(found['runs'])} checkpoints"
        for number, layer in found["layers"].items():
            yield f"  layer {number}: {_number(layer['consistency'])}"


def _of_checkpoint(name: str, found: dict[str, Any]) -> Iterator[str]:
    if name == "positive":
        for kind in ("experts", "dense"):
            for number, share in found[kind].items():
                percent = None if share is None else 100 * share
                yield f"  layer {number}, {kind}: positive activations {_number(percent, '{:.2f} %')}"
    elif name == "removal":
        for number, layer in found["layers"].items():
            rise_E = layer["rise_E"]
            worst = max(range(len(rise_E)), key=rise_E.__getitem__)
            yield f"  layer {number}: without expert {worst} the loss rises most, by {rise_E[worst]:.4f} nats"
    else:
        label, number_of = _NUMBERS[name]
        for number, layer in found.items():
            yield f"  layer {number}: {label} {number_of(layer)}"
