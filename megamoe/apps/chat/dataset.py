"""Prepared conversations by number, and the sequences that several of them are packed into.

The plan of an epoch depends on the seed, the epoch and the lengths alone, and knows no ranks. Sequences go to
the ranks in turn, so one rank sees in order what n ranks see together.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from megamoe.apps.chat.prepare import ChatFiles, load_chat_card
from megamoe.apps.prepare.write import lengths_of
from megamoe.data.batches import Item
from megamoe.data.byte_files import open_bytes, size_of
from megamoe.data.index_file import read_header
from megamoe.errors import UserError
from megamoe.objectives.objective import TrainingObjective

TooLong = Literal["error", "drop", "truncate"]
WINDOW = 4096  # conversations that are packed together
PLANS = 2  # epochs whose plan is kept


@dataclass
class Cuts:
    """What became of conversations of more than `data.sequence_length` tokens.

    too_long: their number. dropped: of these, those left out. tokens: the learned tokens that were cut off or
    dropped, always of whole answers.
    """

    too_long: int = 0
    dropped: int = 0
    tokens: int = 0


def _reader(path: Path, dtype: str) -> Callable[[int, int], np.ndarray]:
    """Return what reads so many numbers of a file from the first one that is named on, int64."""
    file, kind = open_bytes(path), np.dtype(dtype)
    width = kind.itemsize
    return lambda first, count: np.frombuffer(file.read(first * width, count * width), kind).astype(np.int64)


class Conversations:
    """The conversations of a prepared dataset, of at most `most` tokens each.

    Attributes:
        lengths: the tokens of each, int64 [conversations]; those of a long one after its cut.
        numbers: where each stands in the files, int64 [conversations].
        cuts: what became of long ones.
    """

    def __init__(self, prefix: str, most: int, too_long: TooLong, vocab_size: int) -> None:
        """Open the files; read the marks of long conversations, but no tokens.

        Raises:
            UserError: for files that are missing or do not belong together, or conversations that are too
            long.
        """
        files, card = ChatFiles(Path(prefix)), load_chat_card(prefix)
        whole_N = lengths_of(files.data).astype(np.int64)
        self._start_N = np.cumsum(whole_N) - whole_N
        if size_of(files.learned) != card.learned.size:
            raise UserError(f"data {str(files.learned)!r} is missing or has another size than its card says")
        if card.learned.size != whole_N.sum() or card.conversations != len(whole_N):
            raise UserError(
                f"data {prefix!r}: {str(files.card)!r} is another dataset's: it has {card.conversations} "
                f"conversations of {card.learned.size} tokens, the index {len(whole_N)} of {whole_N.sum()}; "
                "prepare them again"
            )
        self._prefix, self._vocab_size, self._card = prefix, vocab_size, card
        self._tokens = _reader(files.data.bin, read_header(files.data.idx)[0].dtype)
        self._learned = _reader(files.learned, "uint8")
        self.cuts = Cuts()
        self.lengths = self._cut(whole_N, most, too_long)
        self.numbers = np.flatnonzero(self.lengths)
        self.lengths = self.lengths[self.numbers]
        if not len(self.numbers):
            raise UserError(f"data {prefix!r}: all conversations are too long; raise data.sequence_length")

    def __len__(self) -> int:
        return len(self.numbers)

    def between(self, first: float, last: float) -> np.ndarray:
        """Return the places of those that stand between two shares of the files, int64."""
        low, high = (round(share * self._card.conversations) for share in (first, last))
        return np.flatnonzero((self.numbers >= low) & (self.numbers < high))

    def read(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a conversation and, for each, whether it is learned, int64 [S] both."""
        start, length = int(self._start_N[self.numbers[place]]), int(self.lengths[place])
        tokens_S, learned_S = self._tokens(start, length), self._learned(start, length)
        if tokens_S.min() < 0 or tokens_S.max() >= self._vocab_size:
            raise UserError(
                f"data: conversation {self.numbers[place]} of {self._prefix!r} holds a token id outside of "
                f"the vocabulary of {self._vocab_size}; put the right file back, and go on with --resume"
            )
        return tokens_S, learned_S

    def _cut(self, whole_N: np.ndarray, most: int, too_long: TooLong) -> np.ndarray:
        """Return the tokens that stay of each conversation; 0: none."""
        long_N = np.flatnonzero(whole_N > most)
        if len(long_N) and too_long == "error":
            raise UserError(
                f"data {self._prefix!r}: {len(long_N):,} of {len(whole_N):,} conversations have more than "
                f"data.sequence_length {most} tokens, the longest {whole_N.max():,}; raise it, or set "
                "train.objective.too_long to truncate (after the last answer that fits) or drop"
            )
        kept_N = whole_N.copy()
        for number in long_N:
            learned_S = self._learned(int(self._start_N[number]), int(whole_N[number]))
            end_A = np.flatnonzero(np.diff(learned_S, append=0) < 0) + 1  # of the answers that are learned
            kept = int(end_A[end_A <= most].max(initial=0)) if too_long == "truncate" else 0
            kept_N[number] = kept
            self.cuts.too_long += 1
            self.cuts.dropped += not kept
            self.cuts.tokens += int(learned_S[kept:].sum())
        return kept_N


def pack(length_N: np.ndarray, size: int, window: int = WINDOW) -> list[list[int]]:
    """Return which of N conversations, in this order, share a sequence of `size` tokens.

    Within a window the longest is placed first, each where it leaves the least space (best fit decreasing).
    Sequences come in the order of their first conversation, and conversations in that of `length_N`.
    """
    packed: list[list[int]] = []
    for first in range(0, len(length_N), window):
        left: list[tuple[int, int]] = []  # the space left in each sequence, and its number, ascending
        found: list[list[int]] = []
        part_N = length_N[first : first + window]
        for place in np.argsort(-part_N, kind="stable").tolist():
            length = int(part_N[place])
            fits = bisect.bisect_left(left, (length, 0))
            space, number = left.pop(fits) if fits < len(left) else (size, len(found))
            if number == len(found):
                found.append([])
            found[number].append(first + place)
            bisect.insort(left, (space - length, number))
        packed += sorted(sorted(each) for each in found)
    return packed


class PackedConversations(Dataset[Item]):
    """Sequences of conversations, epoch after epoch; each conversation once in an epoch.

    An item has `tokens`, `labels`, `position_ids` (int64 [S]; the positions begin at 0 in each conversation),
    `loss_mask` (float32 [S], 1 where the next token is learned), `document_start` (int32 [S]) and `length`
    (int64 [], the tokens before the padding).

    Args:
        objective: of chats, whose options say how conversations are packed and their tokens weighted.
        places: of the conversations, int64.
        name: of the set, for its random order.
        repeats: whether an epoch follows another; otherwise sequences without a loss follow.
    """

    def __init__(
        self,
        objective: TrainingObjective,
        conversations: Conversations,
        places: np.ndarray,
        name: str,
        samples: int,
        repeats: bool = True,
    ) -> None:
        self._objective, self._conversations, self._place_N = objective, conversations, places
        self._name, self._samples, self._repeats = name, samples, repeats
        self._size, self._pad = objective.config.data.sequence_length, objective.vocabulary.pad
        self._starts = [0]  # the first sequence of each epoch
        self.plan = lru_cache(maxsize=PLANS)(self._plan)

    def __len__(self) -> int:
        return self._samples

    def _plan(self, epoch: int) -> list[list[int]]:
        """Return the places of the conversations of each sequence of an epoch."""
        order_N = self._objective.draws(f"{self._name}/order/{epoch}").permutation(self._place_N)
        length_N = self._conversations.lengths[order_N]
        packs = self._objective.options.packing
        groups = pack(length_N, self._size) if packs else [[place] for place in range(len(order_N))]
        return [order_N[group].tolist() for group in groups]

    def __getitem__(self, index: int) -> Item:
        """Return sequence `index`; raise IndexError past the end."""
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of {self._samples}")
        while self._repeats and index >= self._starts[-1]:
            self._starts.append(self._starts[-1] + len(self.plan(len(self._starts) - 1)))
        epoch = bisect.bisect_right(self._starts, index) - 1 if self._repeats else 0
        plan, place = self.plan(epoch), index - self._starts[epoch]
        return self._item(plan[place] if place < len(plan) else [])

    def _item(self, places: list[int]) -> Item:
        size = self._size
        averages = self._objective.options.average == "conversation"
        tokens_S = np.full(size, self._pad, dtype=np.int64)
        labels_S, position_S = tokens_S.copy(), np.zeros(size, dtype=np.int64)
        mask_S, start_S = np.zeros(size, dtype=np.float32), np.zeros(size, dtype=np.int32)
        first = 0
        for place in places:
            own_S, learned_S = self._conversations.read(place)
            last = first + len(own_S)
            tokens_S[first:last] = own_S
            labels_S[first : last - 1] = own_S[1:]
            position_S[first:last] = np.arange(len(own_S))
            start_S[first:last] = first
            mask_S[first : last - 1] = learned_S[1:] / (learned_S[1:].sum() or 1 if averages else 1)
            first = last
        length = max(first, 1)  # a sequence has a token
        start_S[length:] = length
        arrays = {
            "tokens": tokens_S,
            "labels": labels_S,
            "position_ids": position_S,
            "loss_mask": mask_S,
            "document_start": start_S,
            "length": np.array(length),
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
