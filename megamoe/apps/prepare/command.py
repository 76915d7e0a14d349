"""Turn text into the .bin/.idx files that pretraining reads.

python tools/prepare_data.py --stdlib --tokenizer train --vocab-size 4096 --output data/stdlib
python tools/prepare_data.py corpus/*.jsonl.zst --tokenizer path/to/tokenizer.json --output data/corpus
python tools/prepare_data.py --verify data/corpus
"""

import argparse
import signal
import warnings

from megamoe.apps.command import parser_of, run_plain
from megamoe.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """Prepare or verify; return the exit code, 2 also for damaged data."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    texts = "text, .jsonl (both also .gz, .zst, .xz), .parquet; folders, globs and URLs of them"
    add("inputs", nargs="*", metavar="INPUT", help=texts)
    add("--stdlib", action="store_true", help="read the sources of Python's standard library")
    add("--verify", metavar="PREFIX", help="compare PREFIX.bin and .idx with the card; prepare nothing")
    add("--output", metavar="PREFIX", help="write PREFIX.bin, .idx, .counts.npy (of each token), .card.json")
    known = "bytes, a tokenizer.json, a Hugging Face folder, a SentencePiece .model, or train: a new BPE"
    add("--tokenizer", metavar="REF", help=known)
    add("--vocab-size", type=int, help="of the tokenizer that is trained (default 4096)")
    reserved = (
        "pad, mask, sentinels (100, or sentinels=N), <2de>: tokens of the tokenizer, with commas between"
    )
    add("--special", default="", metavar="NAMES", help=reserved)
    add("--key", default="text", help="column or key of the text (default text)")
    add("--ids-column", metavar="NAME", help="column or key of token ids that are ready, instead of text")
    endings, bad = "unknown endings, and .md in folders: an error (default)", "lines that are no document"
    add("--other-files", choices=("refuse", "text"), default="refuse", help=f"{endings}, or plain text")
    add("--bad-lines", choices=("error", "skip"), default="error", help=f"{bad}: an error, or counted")
    add("--workers", type=int, default=1, help="processes that tokenize (default 1)")
    add("--max-documents", type=int, help="stop after so many")
    add("--shuffle-files", type=int, metavar="SEED", help="take the files in a random order")
    add("--overwrite", action="store_true", help="replace an output that exists")
    arguments = parser.parse_args(argv)
    given = [f"--{name}" for name in ("output", "tokenizer") if getattr(arguments, name) is not None]
    if arguments.verify is None and len(given) < 2:
        parser.error("--output and --tokenizer are required, or --verify alone")
    if arguments.verify is not None and (given or arguments.inputs or arguments.stdlib):
        parser.error("--verify prepares nothing: give the prefix of prepared data alone")
    return run_plain(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> None:
    # Not at the top: --help is quick.
    from megamoe.apps.prepare.prepare import TRAIN, Preparation, prepare
    from megamoe.apps.prepare.verify import verify_in_full

    if arguments.verify is not None:
        print(verify_in_full(arguments.verify))
        return
    # Megatron-Core warns of accelerators and ranks, which preparing data has no use for.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = {key: value for key, value in vars(arguments).items() if value is not None}
    if arguments.vocab_size is not None and arguments.tokenizer != TRAIN:
        raise UserError(f"--vocab-size {arguments.vocab_size} is for --tokenizer {TRAIN} only")
    card = prepare(Preparation(**options))
    skipped = "".join(f", {count:,} {reason}" for reason, count in card.skipped.items())
    print(
        f"{arguments.output}: {card.documents:,} documents, {card.tokens:,} tokens of {card.text_bytes:,} "
        f"bytes, vocabulary {card.tokenizer.vocab_size:,}, {card.empty_documents:,} empty documents{skipped} "
        "skipped"
    )
