"""Turn parallel text into pairs for translation, a multilingual corpus and a classification task.

python tools/prepare_pairs.py --catalogues data/wheels/*.whl --min-words 3 --output data/catalogues
python tools/prepare_pairs.py --catalogues django --languages de,fr --output data/django
python tools/prepare_pairs.py --aligned de train.en train.de --aligned fr news.en news.fr --output data/news
python tools/prepare_pairs.py --split-files de 'wmt/{split}.en' 'wmt/{split}.de' --output data/wmt
python tools/prepare_pairs.py --tsv de pairs.tsv.gz --jsonl more.jsonl --output data/mixed
"""

import argparse
import signal
import sys
import warnings


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=raw, argument_default=argparse.SUPPRESS
    )
    add = parser.add_argument
    add(
        "--catalogues",
        nargs="+",
        action="extend",
        metavar="ITEM",
        help="gettext catalogues (.po, .mo): installed packages, wheels, folders or files, with spaces or "
        "commas between; the messages and their translations",
    )
    add(
        "--aligned",
        nargs=3,
        action="append",
        metavar=("LANGUAGE", "SOURCE", "TARGET"),
        help="two files of text whose lines are translations of each other, into LANGUAGE",
    )
    add(
        "--split-files",
        nargs=3,
        action="append",
        metavar=("LANGUAGE", "SOURCE", "TARGET"),
        help="the same for files that are split already: {split} in both names is train, valid or test",
    )
    add(
        "--tsv",
        nargs=2,
        action="append",
        metavar=("LANGUAGE", "FILE"),
        help="lines of source, a tab, and target in LANGUAGE",
    )
    add("--jsonl", nargs="+", action="extend", metavar="FILE", help="JSON objects a line (--keys)")
    add("--keys", type=_words, help="of source, target and language (default source,target,language)")
    _add_output_options(parser)
    return parser.parse_args(argv)


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which pairs are kept, and what is written."""
    add = parser.add_argument
    add("--output", required=True, metavar="FOLDER", help="the new folder")
    add("--source-language", metavar="CODE", help="default en")
    add("--languages", type=_words, help="keep these target languages, such as de,pt_BR (default all)")
    add("--min-words", type=int, help="of a source (default 1)")
    add("--min-pairs", type=int, help="leave out languages with fewer pairs (default 1)")
    add(
        "--max-overlap",
        type=float,
        metavar="SHARE",
        help="leave pairs out of pairs/valid and pairs/test whose target has more than this share of the "
        "source's words (default 1)",
    )
    add(
        "--bilingual",
        action="store_true",
        help="also write bilingual/LANGUAGE, a corpus whose documents are a source and its target",
    )
    add("--min-label", type=int, help="leave out labels with fewer training texts (default 20)")
    add("--max-label", type=int, help="keep at most so many training texts of a label (default all)")
    add(
        "--label-by",
        choices=("module", "application"),
        help="what the labels are: modules such as django.contrib.admin (default), or their applications, "
        "such as django",
    )
    add("--split", type=_shares, help="shares of train, valid and test, by message (default 0.9,0.05,0.05)")
    add(
        "--tokenizer",
        metavar="REF",
        help="train: a new byte-level BPE of all languages (default); sentencepiece: a new SentencePiece "
        "model; or bytes, a tokenizer.json, a Hugging Face folder, a SentencePiece .model",
    )
    add("--vocab-size", type=int, help="of the tokenizer that is trained (default 8192)")
    add(
        "--special",
        metavar="NAMES",
        help="tokens that a trained tokenizer, or bytes, reserves beside the languages' tags such as <2de> "
        "(default pad,mask,sentinels)",
    )
    add(
        "--bad-lines",
        choices=("error", "skip"),
        help="a line of --tsv or --jsonl that is no pair is an error (default), or is left out and counted",
    )
    add("--skip-broken", action="store_true", help="leave broken catalogues out, with a warning")
    add("--overwrite", action="store_true", help="replace a folder of prepared pairs")


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _shares(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers such as 0.9,0.05,0.05") from None


def main(argv: list[str] | None = None) -> int:
    """Prepare; exit code 0, 2 for a user's mistake or broken input, 130 if interrupted."""
    options = vars(parse_arguments(argv))
    if "catalogues" in options:
        options["catalogues"] = [name for item in options["catalogues"] for name in _words(item)]
    from megamoe.apps.translation.prepare import TRAINED, PairPreparation, prepare_pairs
    from megamoe.errors import UserError

    # Megatron-Core warns of accelerators and ranks, which preparing data has no use for.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        preparation = PairPreparation(**options)
        if preparation.tokenizer not in (*TRAINED, "bytes"):
            for name in ("vocab_size", "special"):
                if name in options:
                    option = name.replace("_", "-")
                    raise UserError(
                        f"--{option} {options[name]} is for --tokenizer train, sentencepiece or bytes"
                    )
        summary = prepare_pairs(preparation)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing finished was written", file=sys.stderr)
        return 130
    for line in summary.warnings:
        print(f"warning: {line}", file=sys.stderr)
    print(summary.text(preparation.output))
    return 0
