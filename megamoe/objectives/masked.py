"""Masked language modelling: predict tokens that were hidden, from both sides."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from megamoe.config.schema import RunConfig
from megamoe.data.batches import Batch, Item, stacked
from megamoe.data.tokenizers import word_starts
from megamoe.data.vocabulary import Vocabulary
from megamoe.errors import UserError
from megamoe.objectives.objective import TokenShares, TrainingObjective
from megamoe.registry import register

LONGEST_SPAN = 10_000


@register("objective", "masked")
class Masked(TrainingObjective):
    """Hide a share of each sequence's tokens and predict them from both sides.

    Of the chosen tokens, a share is replaced by the mask, a share by a random token, and the rest stays. The
    choice is new for each sample, so another one in each epoch. Sequences are full; with
    `data.document_aware` a token sees its own document only. End-of-document and reserved tokens are
    never chosen. The mask is the one that the tokenizer reserves, or the vocabulary's last id. A random token
    is one that the data can have.

    Source: Devlin et al. 2018 (BERT), section 3.1; dynamic: Liu et al. 2019 (RoBERTa), section 4.1; spans:
    Joshi et al. 2019 (SpanBERT), section 3.1.
    """

    architectures = ("encoder",)

    @dataclass
    class Config:
        """probability: the share of tokens to predict in each sequence, rounded, at least one; at most that
        share with unit word.

        mask, random: of these, the shares that become the mask and a random token. unit: what is chosen
        together: single tokens; whole words; or spans, with lengths from a geometric distribution of
        parameter span_p over 1 to max_span (0.2 and 10: 3.8 on average), and one replacement for a span.
        """

        probability: float = 0.15
        mask: float = 0.8
        random: float = 0.1
        unit: Literal["token", "word", "span"] = "token"
        span_p: float = 0.2
        max_span: int = 10

    @classmethod
    def check(cls, options: Config, config: RunConfig) -> None:
        for name, value in (("probability", options.probability), ("span_p", options.span_p)):
            if not 0 < value <= 1:
                raise ValueError(f"{name}: found {value:g}, expected a share above 0, at most 1")
        if min(options.mask, options.random) < 0:
            raise ValueError(
                f"mask {options.mask:g}, random {options.random:g}: expected shares of at least 0"
            )
        if not 1 <= options.max_span <= LONGEST_SPAN:
            raise ValueError(f"max_span: found {options.max_span}, expected 1 to {LONGEST_SPAN:,} tokens")
        if options.mask + options.random > 1 + 1e-9:
            raise ValueError(
                f"mask {options.mask:g} and random {options.random:g} are more than 1 together; lower one"
            )

    @classmethod
    def added_ids(cls, options: Config, config: RunConfig, vocabulary: Vocabulary) -> int:
        """Return 1 for the mask, if the tokenizer reserves none."""
        return 1 if vocabulary.special.mask is None else 0

    @classmethod
    def shares(cls, options: Config, config: RunConfig) -> TokenShares:
        """Only chosen tokens have logits."""
        return TokenShares(predicted=options.probability)

    def __init__(self, options: Any, config: RunConfig, vocabulary: Vocabulary) -> None:
        super().__init__(options, config, vocabulary)
        reserved = vocabulary.special.mask
        self.mask_id = vocabulary.of_data.size if reserved is None else reserved
        special = [*vocabulary.special.ids.values(), *([] if vocabulary.eod is None else [vocabulary.eod])]
        self.special = np.array(special, dtype=np.int64)
        self.ordinary = np.setdiff1d(np.arange(vocabulary.data_size), self.special)
        self.starts: Any = None
        if options.unit == "word":
            if vocabulary.tokenizer is None:
                raise UserError(
                    "train.objective: unit word needs the data's tokenizer, which tells where words begin; "
                    "give data.tokenizer, or take unit token or span"
                )
            self.starts = word_starts(vocabulary.tokenizer)

    def sample(self, item: Item, place: str) -> Item:
        """Return tokens with masks, labels (the tokens as they were) and the loss mask of the chosen ones."""
        draws, original_S = self.draws(place), item["tokens"].numpy()
        units = self._units(original_S, draws)
        tokens_S, chosen_S = original_S.copy(), np.zeros(len(original_S), dtype=bool)
        for unit_N in units:
            chosen_S[unit_N] = True
        if self.options.unit == "span":
            for unit_N in units:
                tokens_S[unit_N] = self._replaced(original_S[unit_N], draws, together=True)
        else:
            tokens_S[chosen_S] = self._replaced(original_S[chosen_S], draws, together=False)
        return {
            **item,
            "tokens": torch.from_numpy(tokens_S),
            "labels": torch.from_numpy(original_S),
            "loss_mask": torch.from_numpy(chosen_S.astype(np.float32)),
        }

    def batch(self, items: list[Item], indices: list[int]) -> Batch:
        """Return the batch, with the places that have a loss."""
        batch = stacked(items, indices)
        place_P = batch.loss_mask_BS.T.flatten().nonzero().flatten()
        return replace(batch, predicted_P=place_P)

    def _units(self, tokens_S: np.ndarray, draws: np.random.Generator) -> list[np.ndarray]:
        """Return the places of the chosen tokens, those of a unit together; no place twice."""
        free_S = ~np.isin(tokens_S, self.special)
        place_N = np.flatnonzero(free_S)
        wanted = min(len(place_N), max(1, round(self.options.probability * len(place_N))))
        if self.options.unit == "token":
            return [np.sort(draws.choice(place_N, wanted, replace=False))] if wanted else []
        if self.options.unit == "word":
            starts_S = self.starts(tokens_S)
            return _words(place_N, starts_S, wanted, draws)
        return _spans(free_S, wanted, self.options.span_p, self.options.max_span, draws)

    def _replaced(self, tokens_N: np.ndarray, draws: np.random.Generator, together: bool) -> np.ndarray:
        """Return what stands in place of chosen tokens; together: all masked, all random, or all kept."""
        kind_N = draws.random(len(tokens_N))
        if together:
            kind_N[:] = kind_N[0]
        random_N = draws.choice(self.ordinary, len(tokens_N))
        found_N = np.where(kind_N < self.options.mask + self.options.random, random_N, tokens_N)
        return np.where(kind_N < self.options.mask, self.mask_id, found_N)


def _words(
    place_N: np.ndarray, starts_S: np.ndarray, wanted: int, draws: np.random.Generator
) -> list[np.ndarray]:
    """Return whole words in random order, as many as fit into the wanted number of tokens.

    A word ends where the next begins, and at a token that is not free. A word that is longer than all that
    is wanted is cut, if no shorter one was found.
    """
    if not len(place_N):
        return []
    begins_N = starts_S[place_N] | (np.diff(place_N, prepend=-2) > 1)
    words = np.split(place_N, np.flatnonzero(begins_N)[1:])
    chosen, left = [], wanted
    order = draws.permutation(len(words))
    for number in order:
        if len(words[number]) <= left:
            chosen.append(words[number])
            left -= len(words[number])
        if not left:
            break
    return chosen or [words[order[0]][:wanted]]


def _spans(
    free_S: np.ndarray, wanted: int, p: float, longest: int, draws: np.random.Generator
) -> list[np.ndarray]:
    """Return spans of random places and lengths with exactly the wanted number of tokens.

    A span lies where it fits, if that is possible; otherwise it is cut.
    """
    free_S, chosen = free_S.copy(), []
    length_L = np.arange(1, longest + 1)
    weight_L = (1 - p) ** (length_L - 1.0)
    while wanted:
        length = min(int(draws.choice(length_L, p=weight_L / weight_L.sum())), wanted)
        taken_S = np.concatenate(([0], np.cumsum(~free_S)))
        fits = np.flatnonzero(taken_S[length:] == taken_S[:-length])
        first = int(draws.choice(fits if len(fits) else np.flatnonzero(free_S)))
        last = first + 1
        while last < min(first + length, len(free_S)) and free_S[last]:
            last += 1
        free_S[first:last] = False
        chosen.append(np.arange(first, last))
        wanted -= last - first
    return chosen
