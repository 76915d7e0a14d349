"""Turn conversations into the files that chat tuning reads.

python tools/prepare_chat.py chats.jsonl --tokenizer path/to/folder --output data/chat/train
python tools/prepare_chat.py chats/ --tokenizer tokenizer.json --template chatml --output data/chat/train

A line is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}.
"""

import argparse

from megamoe.apps.chat.named_templates import NAMED
from megamoe.apps.command import parser_of, run_preparation


def main(arguments: list[str] | None = None) -> int:
    """Prepare; return the exit code."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help=".jsonl files (also .gz, .zst), folders, globs")
    add("--output", required=True, metavar="PREFIX", help="of the files, such as data/chat/train")
    kinds = "the model's: bytes, a tokenizer.json, a Hugging Face folder, a SentencePiece .model"
    add("--tokenizer", required=True, metavar="REF", help=kinds)
    names = ", ".join(NAMED)
    add("--template", metavar="NAME", help=f"{names}, or a file of Jinja; default: the tokenizer's own")
    add("--special", default="", metavar="NAMES", help="tokens that bytes reserves, with commas between")
    add("--learn", choices=("all", "last"), default="all", help="which answers are learned; default: all")
    add("--bad-lines", choices=("error", "skip"), default="error", help="lines that are no conversation")
    add("--workers", type=int, default=1, help="processes that render and tokenize (default 1)")
    add("--overwrite", action="store_true", help="replace an output that exists")
    options = parser.parse_args(arguments)
    return run_preparation(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    from megamoe.apps.chat.prepare import ChatPreparation, prepare_chat

    card = prepare_chat(ChatPreparation(**vars(options)))
    share = card.tokens_learned / card.learned.size
    print(
        f"{options.output}: {card.conversations:,} conversations, {card.learned.size:,} tokens, of which "
        f"{card.tokens_learned:,} ({share:.0%}) in {card.answers:,} answers are learned; template "
        f"{card.template_name}"
    )
    for reason, number in card.skipped.items():
        print(f"left out: {number:,} lines: {reason}")
    for line in card.warnings:
        print(f"warning: {line}")
