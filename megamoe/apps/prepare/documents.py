"""What sources yield: documents, and what they leave out; and how a user says which column they are."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from megamoe.errors import UserError

Document = str | np.ndarray  # text, or the ids of its tokens, int [tokens]
LARGEST_DOCUMENT = 1 << 30  # bytes, also of a line


@dataclass(frozen=True)
class Skipped:
    """Documents that a source has and does not yield: why, and how many."""

    reason: str
    count: int = 1


def check_size(num_bytes: int, place: str) -> None:
    """Raise a UserError if a document, or the line that has it, is too large to be read."""
    if num_bytes > LARGEST_DOCUMENT:
        raise UserError(f"{place}: a document of more than {LARGEST_DOCUMENT:,} bytes; divide it")


@dataclass(frozen=True)
class Selection:
    """Which documents of a source are taken, and where in it they are.

    key: the column of the text, or the key of JSON lines. ids: the column of ready tokens instead.
    vocab_size, eod: of the tokenizer; not known while one is trained. bad_lines: `skip` leaves lines out that
    are no document.
    """

    key: str = "text"
    ids: str | None = None
    vocab_size: int = 0
    eod: int = -1
    bad_lines: str = "error"

    def bad_line(self, error: UserError) -> Skipped:
        """Return what is left out where a line is no document, or raise the error that says why."""
        if self.bad_lines == "error":
            raise UserError(f"{error}; or leave such lines out with --bad-lines skip") from None
        return Skipped("bad line")

    @property
    def column(self) -> str:
        return self.ids or self.key

    def checked(self, ids: np.ndarray, place: str) -> np.ndarray:
        """Return the tokens of a document without its end; one at the end of `ids` is taken off.

        Raises:
            UserError: if an id is outside of the vocabulary, or ends the document within it.
        """
        if ids.size and ids[-1] == self.eod:
            ids = ids[:-1]
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            wrong = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise UserError(
                f"{place}: token id {wrong} is outside of the tokenizer's vocabulary of {self.vocab_size}; "
                "name the tokenizer that made the tokens"
            )
        if (ids == self.eod).any():
            raise UserError(
                f"{place}: the end-of-document token {self.eod} is inside of a document; give a row to each"
            )
        return ids

    def of_json(self, value: Any, place: str) -> Document:
        """Return the document under the key of a JSON object.

        Raises:
            UserError: if it is no text, or no list of token ids where these are read.
        """
        if self.ids is not None:
            if not isinstance(value, list) or not all(type(item) is int for item in value):
                raise UserError(f"{place}: expected a list of token ids under {self.ids!r}")
            try:
                ids = np.array(value, dtype=np.int64)
            except OverflowError:
                raise UserError(f"{place}: a token id has more than 64 bits") from None
            return self.checked(ids, place)
        assert isinstance(value, str)
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"{place}: half a surrogate pair in {self.key!r}: {error}") from error
        return value
