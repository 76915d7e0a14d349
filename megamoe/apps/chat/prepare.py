"""Preparing conversations: beside PREFIX.bin and PREFIX.idx, whose documents are rendered conversations, it
writes PREFIX.learned.bin, a byte for each token (1: the model learns to write it), and PREFIX.chat.json.

As in `megamoe/apps/prepare`, everything is written in a hidden folder and renamed at the end, the cards
last. What is written does not depend on the number of workers.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from megamoe import __version__
from megamoe.apps.chat.conversation import ASSISTANT, Conversation, conversation_of
from megamoe.apps.chat.sandbox import BrokenTemplateError
from megamoe.apps.chat.templates import ChatTemplate, load_template
from megamoe.apps.prepare.new_tokenizers import load_with_special
from megamoe.apps.prepare.sources import Source, Tap, find_sources
from megamoe.apps.prepare.write import (
    EncodedDocuments,
    TextCounts,
    blocked_card,
    in_workers,
    locked_folder,
    reference_of,
    write_card,
    write_encoded,
)
from megamoe.data.card import BlockedCard, DataFiles, load_checked, save_checked
from megamoe.data.tokenizers import Tokenizer
from megamoe.errors import UserError, listed
from megamoe.io import parse_json, sync

Learn = Literal["all", "last"]
BadLines = Literal["error", "skip"]
BATCH = 256  # conversations that a worker gets at a time
MOST_WORKERS = 512
LONGEST = 1 << 23  # characters of a conversation; no model reads as many tokens
MOST_SHOWN = 5  # marks that a warning names
MARK = re.compile(r"<\|\w+\|>|</?s>")


@dataclass
class ChatFiles:
    """The names of the files of prepared conversations; `prefix` is what `data.sources` names."""

    prefix: Path

    def __post_init__(self) -> None:
        self.data = DataFiles(self.prefix)
        self.learned = self.prefix.with_name(f"{self.prefix.name}.learned.bin")
        self.card = self.prefix.with_name(f"{self.prefix.name}.chat.json")


@dataclass(frozen=True)
class ChatCard:
    """What `PREFIX.chat.json` says.

    template: the text of the chat template, with which the model is also asked. named: the texts of special
    tokens that it uses. answers: the assistants' turns that are learned. tokens_learned: their tokens.
    skipped: lines that were left out, by what is wrong with them.
    """

    megamoe: str
    template_name: str
    template: str
    named: dict[str, str]
    learn: Learn
    conversations: int
    answers: int
    tokens_learned: int
    learned: BlockedCard
    idx_sha256: str
    skipped: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def chat_template(self) -> ChatTemplate:
        """Return the template."""
        return ChatTemplate(self.template_name, self.template, self.named)


@dataclass(frozen=True)
class ChatPreparation:
    """The options of tools/prepare_chat.py.

    learn: every assistant's turn of a conversation, or its last one. bad_lines: stop at a line that is no
    conversation, or leave it out and count it.
    """

    output: str
    inputs: list[str]
    tokenizer: str
    template: str | None = None
    special: str = ""
    learn: Learn = "all"
    bad_lines: BadLines = "error"
    workers: int = 1
    overwrite: bool = False


class Encoded(NamedTuple):
    """A conversation as tokens.

    tokens_S: int64. learned_S: uint8, 1 for the tokens of the assistants' turns that are learned. answers:
    the number of these turns. text_bytes: of the messages.
    """

    tokens_S: np.ndarray
    learned_S: np.ndarray
    answers: int
    text_bytes: int


def encode_conversation(
    conversation: Conversation, template: ChatTemplate, tokenizer: Tokenizer, learn: Learn = "all"
) -> Encoded:
    """Return a conversation as tokens. A token counts as learned if one of its characters is.

    Raises:
        UserError: for messages that spell a special token, or a template that does not fit them.
    """
    check_texts([conversation.messages, conversation.tools], tokenizer)
    rendered = template.render(conversation)
    tokens, spans = tokenizer.encode_marked(rendered.text)
    wanted = conversation.learned or [True] * len(rendered.spans)
    if learn == "last":
        wanted = [False] * (len(wanted) - 1) + wanted[-1:]
    start_S, end_S = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    learned_S = np.zeros(len(tokens), dtype=np.uint8)
    for (start, end), is_wanted in zip(rendered.spans, wanted, strict=True):
        if is_wanted:
            learned_S |= ((start_S < end) & (end_S > start)).astype(np.uint8)
    size = sum(len(text.encode()) for text in _texts(conversation.messages))
    return Encoded(np.array(tokens, dtype=np.int64), learned_S, sum(wanted), size)


def check_texts(messages: object, tokenizer: Tokenizer) -> None:
    """Check every text of plain data, tool calls and names included.

    Raises:
        UserError: if one has no UTF-8 form, or spells a special token: it would end a turn, or begin one; if
            they are too long: the places of so many tokens take gigabytes.
    """
    texts = list(_texts(messages))
    if (length := sum(map(len, texts))) > LONGEST:
        raise UserError(f"the messages have {length:,} characters, expected at most {LONGEST:,}")
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"half a surrogate pair in a message: {error.reason}") from None
        for mark in tokenizer.marks:
            if mark in text:
                raise UserError(
                    f"a message spells the special token {mark}, which would act as one; reword it"
                )


def _texts(value: object) -> Iterator[str]:
    """Yield every string of plain data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for pair in value.items() for text in _texts(list(pair)))
    elif isinstance(value, list):
        yield from (text for each in value for text in _texts(each))


def load_chat_card(prefix: str) -> ChatCard:
    """Return the card of prepared conversations.

    Raises:
        UserError: if there is none, or it is broken or another dataset's.
    """
    files = ChatFiles(Path(prefix))
    if not files.card.is_file():
        raise UserError(
            f"data {prefix!r} holds no conversations: there is no file {str(files.card)!r}; prepare them "
            "with tools/prepare_chat.py"
        )
    return load_checked(files.card, ChatCard)


def prepare_chat(preparation: ChatPreparation) -> ChatCard:
    """Read, render, tokenize and write conversations; return their card.

    Raises:
        UserError: for input that is missing, broken or empty, an output that exists or cannot be written, a
            broken tokenizer or template. Nothing that looks finished is left then.
    """
    files = ChatFiles(Path(preparation.output))
    _check(preparation, files)
    sources = find_sources(preparation.inputs, stdlib=False)
    tokenizer = load_with_special(preparation.tokenizer, preparation.special)
    template = load_template(preparation.template, tokenizer)
    with locked_folder(files.data.partial, preparation.output):
        new = ChatFiles(files.data.partial / files.prefix.name)
        counts, skipped = TextCounts(), Counter[str]()
        lines = _lines(sources, counts)
        found = _encoded(lines, tokenizer, (template, preparation), skipped)
        counts_V, answers, learned = _write(found, tokenizer, new, counts)
        reference = reference_of(tokenizer, files.prefix.parent, new.data.tokenizer, files.data.tokenizer)
        card = write_card(counts, tokenizer, reference, new.data, counts_V)
        chat = ChatCard(
            megamoe=__version__,
            template_name=template.name,
            template=template.text,
            named=template.named,
            learn=preparation.learn,
            conversations=counts.documents,
            answers=answers,
            tokens_learned=learned,
            learned=blocked_card(new.learned),
            idx_sha256=card.idx.sha256,
            skipped=dict(skipped.most_common()),
            warnings=_warnings(template, tokenizer),
        )
        save_checked(asdict(chat), new.card)
        _publish(new, files)
    return chat


def _check(preparation: ChatPreparation, files: ChatFiles) -> None:
    if not 1 <= preparation.workers <= MOST_WORKERS:
        raise UserError(f"--workers {preparation.workers}: expected 1 to {MOST_WORKERS}")
    if not Path(preparation.output).name or preparation.output.endswith("/"):
        raise UserError(
            f"output {preparation.output!r} is a folder; expected a prefix such as data/chat/train"
        )
    for path in (files.card, files.learned, files.data.card, files.data.bin, files.data.idx):
        if path.exists() and not preparation.overwrite:
            raise UserError(f"output {str(path)!r} exists; choose another --output or add --overwrite")


def _lines(sources: list[Source], counts: TextCounts) -> Iterator[tuple[str, str]]:
    """Yield (place, line) of each line that is not blank; note each source when it is finished."""
    for source in sources:
        if source.kind != ".jsonl":
            raise UserError(f"{source.name}: expected JSON lines, a file such as chats.jsonl(.gz)")
        lines = 0
        with closing(Tap(source)) as tap:
            for number, line in enumerate(tap.lines(), start=1):
                if line.strip():
                    lines += 1
                    yield f"{source.name}:{number}", line
            counts.sources.append(tap.card(lines))


Work = tuple[ChatTemplate, ChatPreparation]  # what a worker needs to encode lines
Result = Encoded | str  # a conversation, or what is wrong with a line that is left out


def _encode_lines(lines: list[tuple[str, str]], tokenizer: Tokenizer, work: Work) -> list[Result]:
    template, preparation = work
    found: list[Result] = []
    for place, line in lines:
        try:
            found.append(_encode_line(line, template, tokenizer, preparation.learn))
        except UserError as error:
            if isinstance(error, BrokenTemplateError):
                raise BrokenTemplateError(f"{place}: {error}") from None
            if preparation.bad_lines == "error":
                raise UserError(f"{place}: {error}; or leave such lines out with --bad-lines skip") from None
            found.append(str(error))
    return found


def _encode_line(line: str, template: ChatTemplate, tokenizer: Tokenizer, learn: Learn) -> Encoded:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise UserError(f"not JSON ({error}); write an object a line") from None
    try:
        encoded = encode_conversation(conversation_of(record), template, tokenizer, learn)
    except RecursionError:
        raise UserError("nested too deeply; leave such schemas or arguments out") from None
    if not encoded.learned_S.any():
        raise UserError("nothing of it is learned: every weight is 0, or that of the last answer")
    return encoded


def _encoded(
    lines: Iterator[tuple[str, str]], tokenizer: Tokenizer, work: Work, skipped: Counter[str]
) -> Iterator[list[Encoded]]:
    """Yield batches of the conversations in the order of the lines; count those that are left out."""
    batches = iter(lambda: list(islice(lines, BATCH)), [])
    for results in in_workers(_encode_lines, batches, tokenizer, work, work[1].workers):
        skipped.update(re.sub(r"\d+", "N", result) for result in results if isinstance(result, str))
        if kept := [result for result in results if not isinstance(result, str)]:
            yield kept


def _write(
    batches: Iterator[list[Encoded]], tokenizer: Tokenizer, files: ChatFiles, counts: TextCounts
) -> tuple[np.ndarray, int, int]:
    """Write .bin, .idx, the counts and what is learned.

    Returns:
        Each token's count, int64 [vocabulary], the learned answers, and their tokens.
    """
    answers, learned = 0, 0

    def documents() -> Iterator[EncodedDocuments]:
        nonlocal answers, learned
        with open(files.learned, "wb") as marks:
            for batch in batches:
                learned_S = np.concatenate([each.learned_S for each in batch])
                marks.write(learned_S.tobytes())
                counts.documents += len(batch)
                counts.text_bytes += sum(each.text_bytes for each in batch)
                answers += sum(each.answers for each in batch)
                learned += int(learned_S.sum())
                lengths = np.array([len(each.tokens_S) for each in batch], dtype=np.int64)
                yield EncodedDocuments(np.concatenate([each.tokens_S for each in batch]), lengths)

    counts_V = write_encoded(documents(), tokenizer, files.data)
    if not counts.documents:
        raise UserError(f"no conversation in {len(counts.sources)} files; name others")
    return counts_V, answers, learned


def _warnings(template: ChatTemplate, tokenizer: Tokenizer) -> list[str]:
    """Return what works, but not as a template is meant."""
    prompt = template.prompt([{"role": "user", "content": "a"}])
    answer = template.render(
        Conversation([{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}])
    )
    marks = {word for text in (prompt, answer.text) for word in MARK.findall(text)}
    unknown = sorted(marks - tokenizer.marks.keys())
    if not unknown:
        return []
    return [
        f"the tokenizer reserves no {listed(unknown, MOST_SHOWN)} of the template: they are ordinary "
        "text, which a message may contain"
    ]


def _publish(new: ChatFiles, files: ChatFiles) -> None:
    """Rename the files to their final names. The old cards are deleted first, the new ones come last."""
    files.card.unlink(missing_ok=True)
    files.data.card.unlink(missing_ok=True)
    for each in (new.learned, new.data.bin, new.data.idx, new.data.counts, new.data.card, new.card):
        sync(each)
        os.replace(each, files.prefix.parent / each.name)
