"""One table of fine-tuned and translating models, beside the baselines that they must beat.

python tools/papers_table.py runs/papers_labels/*/results.json runs/moec_wmt14_*/translation.json

It reads what tools/finetune.py (results.json) and tools/translate.py (--score --json) write. Accuracy is for
the language of the training data and as the mean over all others, with the standard deviation over the
seeds; the baseline is the commonest training label. BLEU and chrF are those of sacreBLEU; the baseline is the
copied source. The last column says by how many points a model is above its baseline, and whether this is at
least the margin of --margin (accuracy) or --margin-bleu. --json and --markdown also write the tables.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from megamoe.apps.command import check_writable, parser_of, run_tool, write_text
from megamoe.errors import UserError
from megamoe.io import read_json, reason

MOST_BYTES = 1 << 28
SCORES = ("BLEU", "chrF", "chrF++")
Table = list[list[str]]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="results.json, or the JSON of translate.py")
    add("--language", default="en", help="of the fine-tuning's training data; default: en")
    add("--metric", default="accuracy", help="of the fine-tuned models; default: accuracy")
    add("--margin", type=float, default=2.0, help="points above the commonest label; default: 2")
    add("--margin-bleu", type=float, default=1.0, help="points above the copied source; default: 1")
    add("--json", type=Path, metavar="FILE", help="the numbers as JSON")
    add("--markdown", type=Path, metavar="FILE", help="the tables, and one of all languages, as Markdown")
    options = parser.parse_args(arguments)
    return run_tool(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    for option, path in (("--json", options.json), ("--markdown", options.markdown)):
        check_writable(option, path)
    tuned, translated = [], []
    for path in options.files:
        found = _read(path)
        if "sets" in found:
            tuned.append(_tuned(path, found, options))
        else:
            translated.append(_translated(path, found, options.margin_bleu))
    tables = [table for table in (_tuned_table(tuned, options), _translated_table(translated)) if table]
    for table in tables:
        print(_aligned(table))
    if options.json is not None:
        content = {"fine-tuned": tuned, "translation": translated}
        write_text("--json", options.json, json.dumps(content, indent=1) + "\n")
    if options.markdown is not None:
        tables += [_languages_table(tuned)] if tuned else []
        write_text("--markdown", options.markdown, "\n".join(_markdown(table) for table in tables))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {reason(error)}; expected JSON of finetune.py or translate.py") from None
    if not isinstance(found, dict) or not ({"sets", "seeds"} <= found.keys() or "scores" in found):
        raise UserError(f"{path}: neither a results.json of finetune.py nor of translate.py --score --json")
    return found


def _tuned(path: Path, found: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the numbers of one fine-tuned model, in percent; its spread is over the seeds."""
    metric, source = options.metric, options.language
    languages = [name for name in found["sets"] if name not in (source, "valid")]
    if source not in found["sets"] or not languages:
        raise UserError(f"{path}: --language: found {source}, expected one of {', '.join(found['sets'])}")
    if metric not in found["metrics"]:
        raise UserError(f"{path}: --metric: found {metric}, expected one of {', '.join(found['metrics'])}")
    seeds = [seed["sets"] for seed in found["seeds"].values()]
    others = [100 * mean(sets[name][metric] for name in languages) for sets in seeds]
    baseline = 100 * mean(found["sets"][name]["majority"][metric] for name in languages)
    return {
        "model": path.parent.name,
        "seeds": list(found["seeds"]),
        "source": [100 * sets[source][metric] for sets in seeds],
        "others": others,
        "languages": {
            name: {
                "scores": [100 * sets[name][metric] for sets in seeds],
                "baseline": 100 * found["sets"][name]["majority"][metric],
                "examples": found["sets"][name]["examples"],
            }
            for name in [source, *languages]
        },
        "source_baseline": 100 * found["sets"][source]["majority"][metric],
        "baseline": baseline,
        "above": mean(others) - baseline,
        "margin": options.margin,
        "beats": mean(others) - baseline >= options.margin,
    }


def _translated(path: Path, found: dict[str, Any], margin: float) -> dict[str, Any]:
    scores = {
        row: {name: found["scores"][row][name]["score"] for name in SCORES} for row in ("translation", "copy")
    }
    above = scores["translation"]["BLEU"] - scores["copy"]["BLEU"]
    return {
        "model": path.parent.name,
        "step": found["step"],
        "sentences": len(found["sentences"]),
        **scores,
        "signatures": {name: found["scores"]["translation"][name]["signature"] for name in SCORES},
        "above": above,
        "margin": margin,
        "beats": above >= margin,
    }


def _tuned_table(tuned: list[dict[str, Any]], options: argparse.Namespace) -> Table:
    if not tuned:
        return []
    head = ["model", options.language, "baseline", "other languages", "baseline", "above it in", "above by"]
    rows = []
    for one in tuned:
        others = [each for name, each in one["languages"].items() if name != options.language]
        above = sum(mean(each["scores"]) > each["baseline"] for each in others)
        shown = [_spread(one["source"]), f"{one['source_baseline']:.1f}", _spread(one["others"])]
        shown += [f"{one['baseline']:.1f}", f"{above} of {len(others)}", _verdict(one)]
        rows.append([one["model"], *shown])
    return [head, *rows]


def _translated_table(translated: list[dict[str, Any]]) -> Table:
    if not translated:
        return []
    rows = [
        [
            f"{one['model']}, step {one['step']}",
            *(f"{one['translation'][name]:.1f}" for name in SCORES),
            _verdict(one),
        ]
        for one in translated
    ]
    copies = {tuple(f"{one['copy'][name]:.1f}" for name in SCORES) for one in translated}
    return [["model", *SCORES, "above by (BLEU)"], *rows, *(["copied source", *copy, ""] for copy in copies)]


def _languages_table(tuned: list[dict[str, Any]]) -> Table:
    """Return a row for each language: every model's mean and spread, and the baseline."""
    rows = []
    for name, known in tuned[0]["languages"].items():
        scores = [
            _spread(one["languages"][name]["scores"]) if name in one["languages"] else "" for one in tuned
        ]
        rows.append([name, str(known["examples"]), *scores, f"{known['baseline']:.1f}"])
    return [["language", "texts", *(one["model"] for one in tuned), "baseline"], *rows]


def _spread(values: list[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def _verdict(one: dict[str, Any]) -> str:
    return f"{one['above']:+.1f} ({'at least' if one['beats'] else 'less than'} {one['margin']:g})"


def _aligned(table: Table) -> str:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _markdown(table: Table) -> str:
    rows = [table[0], ["---"] * len(table[0]), *table[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
