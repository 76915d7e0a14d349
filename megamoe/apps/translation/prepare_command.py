"""Turn parallel text into pairs for translation and a multilingual corpus.

python tools/prepare_pairs.py --aligned de train.en train.de --aligned fr news.en news.fr --output data/news
python tools/prepare_pairs.py --split-files de 'wmt/{split}.en' 'wmt/{split}.de' --output data/wmt
python tools/prepare_pairs.py --tsv de pairs.tsv.gz --tsv fr more.tsv --output data/mixed
"""

import argparse
import sys
from typing import Any

from megamoe.apps.command import parser_of, run_preparation
from megamoe.errors import UserError, printable


def main(arguments: list[str] | None = None) -> int:
    """Prepare; return the exit code."""
    options = vars(pairs_parser(__doc__).parse_args(arguments))
    return run_preparation(lambda: prepare(options))


def pairs_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser; what the command line leaves out has the default of `PairPreparation`."""
    parser = parser_of(description)
    parser.argument_default = argparse.SUPPRESS
    add, files = parser.add_argument, ("LANGUAGE", "SOURCE", "TARGET")
    add("--aligned", nargs=3, action="append", metavar=files, help="files of text, line by line translations")
    add("--split-files", nargs=3, action="append", metavar=files, help="the same, with {split} in both names")
    add("--tsv", nargs=2, action="append", metavar=("LANGUAGE", "FILE"), help="lines of source, tab, target")
    add("--output", required=True, metavar="FOLDER", help="the new folder")
    add("--source-language", metavar="CODE", help="default en")
    add("--languages", type=_words, help="keep these target languages, such as de,pt_BR (default all)")
    add("--min-words", type=int, help="of a source (default 1)")
    add("--min-pairs", type=int, help="leave out languages with fewer pairs (default 1)")
    share = "of a source's words in its target, at most, for pairs/valid and pairs/test (default 1)"
    add("--max-overlap", type=float, metavar="SHARE", help=share)
    add("--bilingual", action="store_true", help="also corpora whose documents are a source and its target")
    add("--split", type=_shares, help="shares of train, valid and test, by message (default 0.9,0.05,0.05)")
    kinds = "train (default) or sentencepiece, which make one; bytes, a tokenizer.json, a folder, a .model"
    add("--tokenizer", metavar="REF", help=kinds)
    add("--vocab-size", type=int, help="of the tokenizer that is trained (default 8192)")
    add("--special", metavar="NAMES", help="tokens to reserve beside <2de> (default pad,mask,sentinels)")
    add("--bad-lines", choices=("error", "skip"), help="lines of --tsv that are no pair")
    add("--overwrite", action="store_true", help="replace a folder of prepared pairs")
    return parser


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _shares(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers such as 0.9,0.05,0.05") from None


def prepare(options: dict[str, Any], **hooks: Any) -> None:
    """Prepare pairs and say what was done. hooks: of `prepare_pairs`."""
    from megamoe.apps.translation.prepare import TRAINED, PairPreparation, prepare_pairs

    preparation = PairPreparation(**options)
    for name in ("vocab_size", "special"):
        if name in options and preparation.tokenizer not in (*TRAINED, "bytes"):
            option = f"--{name.replace('_', '-')} {options[name]}"
            raise UserError(f"{option} is for --tokenizer train, sentencepiece or bytes")
    summary = prepare_pairs(preparation, **hooks)
    for line in summary.warnings:
        print(f"warning: {printable(line)}", file=sys.stderr)
    print(summary.text(preparation.output))
