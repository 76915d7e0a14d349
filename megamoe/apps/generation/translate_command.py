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

from megamoe.apps.command import (
    CONTROLS,
    STDIN,
    check_positive,
    check_writable,
    lines_of,
    model_parser,
    run_tool,
    write_text,
)
from megamoe.errors import UserError
from megamoe.io import real

MOST_BYTES = 1 << 28
OF_SEARCH = ("beams", "length_penalty", "early_stopping", "min_length", "n_best")  # as in `BeamOptions`
OF_PAIRS = ("pairs", "split", "samples", "write_references")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    options = _parser().parse_intermixed_args(arguments)
    return run_tool(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = model_parser(__doc__)
    add = parser.add_argument
    add("--from", required=True, dest="source", metavar="LANGUAGE", help="of the sources, such as en")
    add("--to", required=True, dest="target", metavar="LANGUAGE", help="of the translations, such as de")
    add("--input", type=Path, metavar="FILE", help="a sentence on each line; - for standard input")
    add("--reference", type=Path, metavar="FILE", help="a translation of each line of --input, for --score")
    add("--pairs", metavar="FOLDER", help="prepared pairs instead; default: those of the run")
    add("--split", help="of the pairs; default: test")
    add("--samples", type=int, metavar="N", help="the first N pairs only")
    add("--too-long", choices=("error", "truncate"), default="error", help="sources of too many tokens")
    add("--beams", type=int, default=4, help="hypotheses of the beam search; 1: greedy; default: 4")
    add("--length-penalty", type=float, default=1.0, help="p of log P / tokens^p; default: 1")
    add("--early-stopping", choices=("yes", "no", "never"), default="no", help="when it ends; default: no")
    add("--min-length", type=int, default=1, help="tokens before the end at least; default: 1")
    add("--max-length", type=int, help="tokens at most; default: data.sequence_length")
    add("--max-extra", type=int, default=50, help="tokens beyond those of the source at most; default: 50")
    add("--n-best", type=int, default=1, help="hypotheses of each sentence in the output; default: 1")
    add("--batch-size", type=int, default=32, help="sentences translated together; default: 32")
    add("--no-cache", action="store_true", help="compute every hypothesis anew for each token")
    add("--keep-capacity", action="store_true", help="let the routers drop pairs, as in evaluation")
    add("--score", action="store_true", help="print BLEU, chrF and chrF++, and those of the copied sources")
    add("--tokenize", help="of sacreBLEU's BLEU; default: 13a, for Chinese zh")
    add("--output", type=Path, metavar="FILE", help="the translations, one on each line")
    add("--write-references", type=Path, metavar="FILE", help="the pairs' references, one on each line")
    add("--json", type=Path, metavar="FILE", help="scores, signatures, hypotheses and speed as JSON")
    return parser


def _run(options: argparse.Namespace) -> None:
    _check(options)
    lines, references = (
        None if path is None else lines_of(option, path, MOST_BYTES)
        for option, path in (("--input", options.input), ("--reference", options.reference))
    )
    from megamoe.apps.evaluation.trained_model import session
    from megamoe.apps.generation.beam_search import BeamOptions
    from megamoe.apps.generation.runner import prepare
    from megamoe.apps.generation.scores import default_tokenize, metrics_of, scored_twice
    from megamoe.apps.generation.translate import Lengths, direction_of, of_lines, of_pairs, translate

    search = BeamOptions(*(getattr(options, name) for name in OF_SEARCH))
    lengths = Lengths(options.max_length, options.max_extra)
    tokenize = options.tokenize or default_tokenize(options.target)
    metrics = metrics_of(tokenize) if options.score else {}
    with session(options.overrides, options.precision) as ranks:
        trained = ranks.open(options.path, architectures=("encoder_decoder",))
        direction = direction_of(trained, options.source, options.target)
        if lines is not None:
            sentences = of_lines(trained, direction, lines, references, options.too_long)
        else:
            given = (options.pairs, options.split or "test", options.samples, options.too_long)
            sentences = of_pairs(trained, direction, *given)
        cached, notes = prepare(trained, options.keep_capacity, not options.no_cache)
        is_first = ranks.world.is_first
        if sentences.cut:
            notes.append(f"{sentences.cut} sources cut to data.sequence_length")
        for note in notes if is_first else []:
            print(note, file=sys.stderr)
        start = time.monotonic()
        found = translate(
            trained, direction, sentences, search, lengths, batch_size=options.batch_size, cached=cached
        )
        speed = _speed(found, time.monotonic() - start)
        if not is_first:
            return
        print(
            f"{len(found)} sentences in {speed['seconds']:.1f} s: "
            f"{speed['sentences_per_s']:.1f} sentences/s, {speed['tokens_per_s']:.0f} tokens/s",
            file=sys.stderr,
        )
        texts = _texts(trained, found)
        result = _result(trained, options, sentences, found, texts)
        settings = {**dataclasses.asdict(search), "max_extra": options.max_extra}
        if options.max_length is not None:
            settings["max_length"] = options.max_length
        result |= {"search": settings, "speed": speed}
        if metrics and sentences.references is not None:
            best = [hypotheses[0] for hypotheses in texts]
            scores = scored_twice(metrics, best, sentences.texts, sentences.references)
            result["scores"] = {
                key: {name: dataclasses.asdict(score) for name, score in each.items()}
                for key, each in scores.items()
            }
            _print_scores(scores)
        _write(options, texts, sentences, result)


def _check(options: argparse.Namespace) -> None:
    """Refuse options that cannot be, or that have no effect beside others, before anything is loaded."""
    check_positive("--batch-size", options.batch_size)
    check_positive("--samples", options.samples)
    written: dict[Path, str] = {}
    for name in ("output", "write_references", "json"):
        option, path = _spelling(name), getattr(options, name)
        check_writable(option, path)
        if path is not None and (other := written.setdefault(real(path), option)) != option:
            raise UserError(f"{option}: {path} is also the file of {other}; name another one")
    if options.input == STDIN and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("--input: -, but only one of several ranks has the standard input; name a file")
    for name in OF_PAIRS if options.input is not None else ():
        if getattr(options, name) is not None:
            option = _spelling(name)
            raise UserError(f"{option}: is for pairs, but --input names lines; leave one of the two out")
    if options.reference is not None and options.input is None:
        raise UserError("--reference: is for --input; the pairs have references")
    if options.score and options.input is not None and options.reference is None:
        raise UserError("--score: --input has no references; give them with --reference FILE")
    if options.reference is not None and not options.score:
        raise UserError("--reference: is for --score; add it")
    if options.tokenize is not None and not options.score:
        raise UserError("--tokenize: is for BLEU; add --score, or leave it out")
    if options.max_length is not None and options.min_length > options.max_length > 0:
        raise UserError(
            f"--min-length: found {options.min_length}, more than --max-length {options.max_length}; lower "
            "one, or raise the other"
        )


def _spelling(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _texts(trained: Any, found: list[list[Any]]) -> list[list[str]]:
    """Return the text of each hypothesis of each sentence; a blank sentence has one, which is blank."""
    from megamoe.apps.generation.generate import tokenizer_of

    tokenizer = tokenizer_of(trained)
    return [[tokenizer.decode(one.tokens) for one in hypotheses] or [""] for hypotheses in found]


def _print_scores(scores: dict[str, dict[str, Any]]) -> None:
    """Print a row for the translations and one for the copy baseline, and the signatures."""
    names = list(scores["translation"])
    print("  ".join(["             ", *(f"{name:>7}" for name in names)]))
    for label, key in (("translation", "translation"), ("copied source", "copy")):
        print("  ".join([f"{label:<13}", *(f"{scores[key][name].score:7.2f}" for name in names)]))
    for name in names:
        print(f"{name}: {scores['translation'][name].signature}")


def _write(
    options: argparse.Namespace, texts: list[list[str]], sentences: Any, result: dict[str, Any]
) -> None:
    """Write what the options name; without any of them print the translations."""
    from megamoe.apps.generation.scores import one_line

    if options.n_best > 1:
        rows = [
            f"{number} ||| {one_line(text)} ||| {hypothesis['score']:.4f}"
            for number, entry in enumerate(result["sentences"])
            for text, hypothesis in zip(texts[number], entry["hypotheses"], strict=False)
        ]
    else:
        rows = [one_line(best) for best, *_ in texts]
    if options.output is not None:
        write_text("--output", options.output, "".join(f"{row}\n" for row in rows))
    if options.write_references is not None:
        lines = "".join(f"{one_line(text)}\n" for text in sentences.references)
        write_text("--write-references", options.write_references, lines)
    if options.json is not None:
        write_text("--json", options.json, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    if options.output is None and options.json is None and not options.score:
        for row in rows:
            print(row.translate(CONTROLS))


def _result(
    trained: Any, options: argparse.Namespace, sentences: Any, found: Any, texts: list[list[str]]
) -> dict[str, Any]:
    """Return what --json writes, without the settings, the speed and the scores."""
    entries = []
    for number, hypotheses in enumerate(found):
        entry: dict[str, Any] = {"source": sentences.texts[number]}
        if sentences.references is not None:
            entry["reference"] = sentences.references[number]
        rows = zip(texts[number], hypotheses, strict=False)
        entry["hypotheses"] = [{"text": text, **dataclasses.asdict(each)} for text, each in rows]
        entries.append(entry)
    return {
        "checkpoint": str(trained.path),
        "step": trained.step,
        "from": options.source,
        "to": options.target,
        "precision": trained.precision,
        "cut": sentences.cut,
        "sentences": entries,
    }


def _speed(found: list[list[Any]], seconds: float) -> dict[str, float]:
    """Return sentences, and tokens of the returned hypotheses, for each second of the search."""
    tokens = sum(len(one.tokens) for hypotheses in found for one in hypotheses)
    return {
        "seconds": seconds,
        "sentences_per_s": len(found) / max(seconds, 1e-9),
        "tokens_per_s": tokens / max(seconds, 1e-9),
    }
