"""Turn parallel text into pairs for translation, a multilingual corpus and a classification task.

python tools/prepare_pairs.py --catalogues data/wheels/*.whl --min-words 3 --output data/catalogues
python tools/prepare_pairs.py --aligned de train.en train.de --aligned fr news.en news.fr --output data/news
python tools/prepare_pairs.py --split-files de 'wmt/{split}.en' 'wmt/{split}.de' --output data/wmt
python tools/prepare_pairs.py --tsv de pairs.tsv.gz --tsv fr more.tsv --output data/mixed
"""

import argparse
import signal
import sys
import warnings
from typing import Any

from megamoe.apps.command import parser_of, run_tool
from megamoe.errors import UserError, printable


def main(arguments: list[str] | None = None) -> int:
    """Prepare; return the exit code."""
    options = _parser().parse_args(arguments)
    # Megatron-Core warns of accelerators and ranks, which preparing data has no use for.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return run_tool(lambda: _run(vars(options)))


def _parser() -> argparse.ArgumentParser:
    """Return the parser; what the command line leaves out has the default of `PairPreparation`."""
    parser = parser_of(__doc__)
    parser.argument_default = argparse.SUPPRESS
    add = parser.add_argument
    files, items = ("LANGUAGE", "SOURCE", "TARGET"), "of gettext: wheels, folders, files"
    add("--catalogues", nargs="+", action="extend", metavar="ITEM", help=items)
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
    add("--min-label", type=int, help="leave out labels with fewer training texts (default 20)")
    add("--max-label", type=int, help="keep at most so many training texts of a label (default all)")
    add("--label-by", choices=("module", "application"), help="what the labels are (default module)")
    add("--split", type=_shares, help="shares of train, valid and test, by message (default 0.9,0.05,0.05)")
    kinds = "train (default) or sentencepiece, which make one; bytes, a tokenizer.json, a folder, a .model"
    add("--tokenizer", metavar="REF", help=kinds)
    add("--vocab-size", type=int, help="of the tokenizer that is trained (default 8192)")
    add("--special", metavar="NAMES", help="tokens to reserve beside <2de> (default pad,mask,sentinels)")
    add("--bad-lines", choices=("error", "skip"), help="lines of --tsv that are no pair")
    add("--skip-broken", action="store_true", help="leave broken catalogues out, with a warning")
    add("--overwrite", action="store_true", help="replace a folder of prepared pairs")
    return parser


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _shares(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers such as 0.9,0.05,0.05") from None


def _run(options: dict[str, Any]) -> None:
    from megamoe.apps.translation.prepare import TRAINED, PairPreparation, prepare_pairs

    if "catalogues" in options:
        options["catalogues"] = [name for item in options["catalogues"] for name in _words(item)]
    preparation = PairPreparation(**options)
    for name in ("vocab_size", "special"):
        if name in options and preparation.tokenizer not in (*TRAINED, "bytes"):
            option = f"--{name.replace('_', '-')} {options[name]}"
            raise UserError(f"{option} is for --tokenizer train, sentencepiece or bytes")
    summary = prepare_pairs(preparation)
    for line in summary.warnings:
        print(f"warning: {printable(line)}", file=sys.stderr)
    print(summary.text(preparation.output))
