"""Translate text, or the held-out pairs of a corpus, with a checkpoint; BLEU and chrF by sacreBLEU.

python tools/translate.py runs/translation_small_dense --from en --to de --score
python tools/translate.py runs/translation_small_dense --from en --to de --beams 1 --score --json scores.json
echo "Save the file" | python tools/translate.py runs/translation_small_dense --from en --to de --input -
torchrun --nproc-per-node 2 tools/translate.py runs/translation_small_moec --from en --to de parallel.expert=2

Without --input the pairs `--split` (default: test) of `--pairs` are translated, by default those beside the
pairs that the model was trained on. Translations go to --output, or to standard output if neither --output,
--json nor --score is given. Arguments `section.key=value` override the saved configuration.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from megamoe.apps.command import CONTROLS, STDIN, check_options, lines_of, model_parser, run_tool, write_text
from megamoe.errors import UserError

MOST_BYTES = 1 << 28
OF_PAIRS = ("pairs", "split", "samples", "write_references")  # and --score


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = model_parser(__doc__)
    add = parser.add_argument
    add("--from", required=True, dest="source", metavar="LANGUAGE", help="of the sources, such as en")
    add("--to", required=True, dest="target", metavar="LANGUAGE", help="of the translations, such as de")
    add("--input", type=Path, metavar="FILE", help="a sentence on each line; - for standard input")
    add("--pairs", metavar="FOLDER", help="prepared pairs instead; default: those of the run")
    add("--split", help="of the pairs; default: test")
    add("--samples", type=int, metavar="N", help="the first N pairs only")
    add("--too-long", choices=("error", "truncate"), default="error", help="sources of too many tokens")
    add("--beams", type=int, default=4, help="hypotheses of the beam search; 1: greedy; default: 4")
    add("--length-penalty", type=float, default=1.0, help="p of log P / tokens^p; default: 1")
    add("--max-length", type=int, help="tokens at most; default: data.sequence_length")
    add("--n-best", type=int, default=1, help="hypotheses of each sentence in the output; default: 1")
    add("--batch-size", type=int, default=32, help="sentences translated together; default: 32")
    add("--score", action="store_true", help="print BLEU, chrF and chrF++, and those of the copied sources")
    add("--output", type=Path, metavar="FILE", help="the translations, one on each line")
    add("--write-references", type=Path, metavar="FILE", help="the pairs' references, one on each line")
    add("--json", type=Path, metavar="FILE", help="scores, signatures, hypotheses and speed as JSON")
    options = parser.parse_intermixed_args(arguments)
    return run_tool(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    _check(options)
    lines = None if options.input is None else lines_of("--input", options.input, MOST_BYTES)
    from megamoe.apps.evaluation.trained_model import session
    from megamoe.apps.generation.beam_search import BeamOptions
    from megamoe.apps.generation.runner import leave_capacity_out
    from megamoe.apps.generation.scores import metrics_of, scored_twice
    from megamoe.apps.generation.translate import direction_of, of_lines, of_pairs, translate

    search = BeamOptions(options.beams, options.length_penalty, options.n_best)
    metrics = metrics_of(options.target) if options.score else {}
    with session(options.overrides, options.precision) as ranks:
        trained = ranks.open(options.path, architectures=("encoder_decoder",))
        direction = direction_of(trained, options.source, options.target)
        if lines is not None:
            sentences = of_lines(trained, direction, lines, options.too_long)
        else:
            chosen = (options.pairs, options.split or "test", options.samples)
            sentences = of_pairs(trained, direction, *chosen, options.too_long)
        notes = leave_capacity_out(trained)
        if sentences.cut:
            notes.append(f"{sentences.cut} sources cut to data.sequence_length")
        for note in notes if ranks.world.is_first else []:
            print(note, file=sys.stderr)
        start = time.monotonic()
        size, longest = options.batch_size, options.max_length
        found = translate(trained, direction, sentences, search, max_length=longest, batch_size=size)
        seconds = max(time.monotonic() - start, 1e-9)
        if not ranks.world.is_first:
            return
        rows = _rows(trained, sentences, found)
        result: dict[str, Any] = {
            "checkpoint": str(trained.path),
            "step": trained.step,
            "from": options.source,
            "to": options.target,
            "precision": trained.precision,
            "cut": sentences.cut,
            "sentences": rows,
            "search": {**dataclasses.asdict(search), "max_length": longest},
            "speed": _speed(found, seconds),
        }
        if metrics:
            best = [row["hypotheses"][0]["text"] for row in rows]
            result["scores"] = scored_twice(metrics, best, sentences.texts, sentences.references or [])
            _print_scores(result["scores"])
        _write(options, result)


def _check(options: argparse.Namespace) -> None:
    """Refuse options that cannot be, or that have no effect beside others, before anything is loaded."""
    check_options(options, "batch_size", "samples", "max_length", "output", "write_references", "json")
    if options.input == STDIN and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("--input: -, but only one of several ranks has the standard input; name a file")
    for name in (*OF_PAIRS, "score") if options.input is not None else ():
        if getattr(options, name) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option}: is for pairs, but --input names lines; leave one of the two out")


def _rows(trained: Any, sentences: Any, found: list[list[Any]]) -> list[dict[str, Any]]:
    """Return each sentence with its reference, if there is one, and its hypotheses with their texts."""
    from megamoe.apps.generation.generate import tokenizer_of

    tokenizer, rows = tokenizer_of(trained), []
    for number, hypotheses in enumerate(found):
        row: dict[str, Any] = {"source": sentences.texts[number]}
        if sentences.references is not None:
            row["reference"] = sentences.references[number]
        row["hypotheses"] = [
            {"text": tokenizer.decode(each.tokens), **dataclasses.asdict(each)} for each in hypotheses
        ]
        rows.append(row)
    return rows


def _print_scores(scores: dict[str, dict[str, Any]]) -> None:
    """Print a row for the translations and one for the copy baseline, and the signatures."""
    names = list(scores["translation"])
    print("  ".join(["             ", *(f"{name:>7}" for name in names)]))
    for label, key in (("translation", "translation"), ("copied source", "copy")):
        print("  ".join([f"{label:<13}", *(f"{scores[key][name]['score']:7.2f}" for name in names)]))
    for name in names:
        print(f"{name}: {scores['translation'][name]['signature']}")


def _write(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write what the options name; without any of them print the translations."""
    from megamoe.apps.generation.scores import one_line

    lines, rows = [], result["sentences"]
    for number, row in enumerate(rows):
        if options.n_best > 1:
            lines += [
                f"{number} ||| {one_line(each['text'])} ||| {each['score']:.4f}" for each in row["hypotheses"]
            ]
        else:
            lines += [one_line(each["text"]) for each in row["hypotheses"]] or [""]
    if options.output is not None:
        write_text("--output", options.output, "".join(f"{line}\n" for line in lines))
    if options.write_references is not None:
        references = "".join(f"{one_line(row['reference'])}\n" for row in rows)
        write_text("--write-references", options.write_references, references)
    if options.json is not None:
        write_text("--json", options.json, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    if options.output is None and options.json is None and not options.score:
        for line in lines:
            print(line.translate(CONTROLS))


def _speed(found: list[list[Any]], seconds: float) -> dict[str, float]:
    """Print and return sentences, and tokens of the returned hypotheses, for each second of the search."""
    tokens = sum(len(one.tokens) for hypotheses in found for one in hypotheses)
    speed = {"seconds": seconds, "sentences_per_s": len(found) / seconds, "tokens_per_s": tokens / seconds}
    print(
        f"{len(found)} sentences in {seconds:.1f} s: {speed['sentences_per_s']:.1f} sentences/s, "
        f"{speed['tokens_per_s']:.0f} tokens/s",
        file=sys.stderr,
    )
    return speed
