"""A batch as lines of text: which tokens have a loss, where documents begin, what is padding."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from megamoe.apps.command import CONTROLS
from megamoe.data.batches import Batch
from megamoe.data.tokenizers import Tokenizer

LOSS, PLAIN, PADDING, RULE = "loss", "plain", "padding", "rule"
COLOURS = {LOSS: "\x1b[1;32m", PLAIN: "\x1b[0m", PADDING: "\x1b[2m", RULE: "\x1b[36m"}
END = "\x1b[0m"
OPEN, CLOSE = "[[", "]]"  # around what has a loss, where there are no colours


@dataclass(frozen=True)
class Piece:
    """Text of one kind: `loss`, `plain` (no loss), `padding` or `rule` (a line about what follows)."""

    kind: str
    text: str


@dataclass(frozen=True)
class Words:
    """Token ids to text. tokenizer: None: ids are shown. names: labels that are no tokens, by number."""

    tokenizer: Tokenizer | None
    labels_are_tokens: bool = True

    def of(self, tokens: list[int]) -> str:
        """Return the text of tokens; special ones by their names."""
        if self.tokenizer is None:
            return "".join(f"{token} " for token in tokens)
        names = {number: text for text, number in self.tokenizer.marks.items()}
        size = self.tokenizer.vocab_size
        texts = []
        for name, group in groupby(
            tokens, lambda token: names.get(token, f"<{token}>" if token >= size else "")
        ):
            run = list(group)
            texts.append(name * len(run) if name else self.tokenizer.decode(run))
        return "".join(texts).translate(CONTROLS)

    def label(self, number: int | float) -> str:
        """Return what is predicted of a place: a token, or a label's number."""
        return self.of([int(number)]) if self.labels_are_tokens else f"{number:g}"


def pieces_of(batch: Batch, row: int, words: Words) -> Iterator[Piece]:
    """Yield what a sequence of a batch holds, in order.

    Where the labels are the next tokens, a token has a loss if it is predicted from the one before. Otherwise
    the label stands behind its place: `<mask>->word`.
    """
    if batch.source_BL is not None and batch.source_lengths_B is not None:
        length, whole = int(batch.source_lengths_B[row]), batch.source_BL.shape[1]
        yield Piece(RULE, f"source, {length} tokens")
        yield Piece(PLAIN, words.of(batch.source_BL[row, :length].tolist()))
        yield from _padding(whole - length)
    tokens_S, labels_S, mask_S = batch.tokens_BS[row], batch.labels_BS[row], batch.loss_mask_BS[row]
    length = len(tokens_S) if batch.lengths_B is None else int(batch.lengths_B[row])
    follows = words.labels_are_tokens and _follows(batch)
    lost_S = torch.cat((mask_S.new_zeros(1), mask_S[:-1])) if follows else mask_S
    for number, (first, last) in enumerate(_documents(batch, row, length), start=1):
        losses = int((mask_S[first:last] > 0).sum())
        yield Piece(RULE, f"document {number}: {last - first} tokens, {losses} losses")
        if follows:
            for has_loss, part in _runs(lost_S[first:last]):
                tokens = tokens_S[first:last][part].tolist()
                yield Piece(LOSS if has_loss else PLAIN, words.of(tokens))
            if last == len(tokens_S) and mask_S[-1] > 0:  # predicted, but not read any more
                yield Piece(LOSS, words.label(labels_S[-1].item()))
        else:
            yield from _in_place(tokens_S, labels_S, mask_S, range(first, last), words)
    yield from _padding(len(tokens_S) - length)


def _in_place(
    tokens_S: Tensor, labels_S: Tensor, mask_S: Tensor, places: range, words: Words
) -> Iterator[Piece]:
    """Yield tokens whose labels are not the tokens after them."""
    plain: list[int] = []
    for place in places:
        plain.append(int(tokens_S[place]))
        if mask_S[place] > 0:
            if plain[:-1]:
                yield Piece(PLAIN, words.of(plain[:-1]))
            yield Piece(LOSS, f"{words.of(plain[-1:])}->{words.label(labels_S[place].item())}")
            plain = []
    if plain:
        yield Piece(PLAIN, words.of(plain))


def _follows(batch: Batch) -> bool:
    """Whether the labels with a loss are the tokens after their places."""
    if batch.labels_BS.shape != batch.tokens_BS.shape or batch.labels_BS.is_floating_point():
        return False
    counts_BS = batch.loss_mask_BS[:, :-1] > 0
    return bool((batch.labels_BS[:, :-1] == batch.tokens_BS[:, 1:])[counts_BS].all())


def _documents(batch: Batch, row: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the [first, last) of each document of a sequence, without padding."""
    starts = [0]
    if batch.document_start_BS is not None:
        start_S = batch.document_start_BS[row, :length]
        starts = (start_S == torch.arange(length)).nonzero().flatten().tolist()
    yield from zip(starts, [*starts[1:], length], strict=True)


def _runs(values_S: Tensor) -> Iterator[tuple[bool, slice]]:
    """Yield runs of positions with and without a loss."""
    first = 0
    for has_loss, group in groupby((values_S > 0).tolist()):
        last = first + len(list(group))
        yield has_loss, slice(first, last)
        first = last


def _padding(count: int) -> Iterator[Piece]:
    if count:
        yield Piece(PADDING, f"<padding x {count}>")


def text_of(pieces: Iterator[Piece], colours: bool) -> str:
    """Return the pieces as text: in colours, or with marks around what has a loss."""
    found: list[str] = []
    for piece in pieces:
        if piece.kind == RULE:
            found.append("" if not found or found[-1].endswith("\n") else "\n")
        text = f"--- {piece.text} ---\n" if piece.kind == RULE else piece.text
        if colours:
            text = f"{COLOURS[piece.kind]}{text}{END}"
        elif piece.kind == LOSS:
            text = f"{OPEN}{text}{CLOSE}"
        found.append(text)
    return "".join(found)
