"""Chat tuning: a decoder learns what the assistant says in conversations."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from megamoe.apps.chat.dataset import Conversations, PackedConversations, TooLong
from megamoe.apps.chat.prepare import ChatFiles, load_chat_card
from megamoe.config.schema import DataConfig, RunConfig
from megamoe.data.batches import Batch, Item, stacked
from megamoe.data.byte_files import is_stored
from megamoe.data.datasets import VALID, Datasets, check_split
from megamoe.data.ranks import once_per_machine, rank
from megamoe.data.verify import scan, verify_sources
from megamoe.data.vocabulary import Vocabulary
from megamoe.errors import UserError
from megamoe.objectives.objective import TokenShares, TrainingObjective
from megamoe.registry import register


@register("objective", "chat")
class Chat(TrainingObjective):
    """Predict what the assistant says in conversations, given all that was said before.

    `data.sources` names conversations of tools/prepare_chat.py. The loss is the mean cross entropy of the
    tokens of the assistant's turns, the end of a turn included; system, users and tools have none.
    Conversations are packed into sequences of `data.sequence_length` tokens, and none sees another one. What
    a sequence lacks is padding, which is never routed and has no share in a balance loss.

    Source: Ouyang et al. 2022 (InstructGPT), section 3.5; Krell et al. 2021 (packing without contamination).
    """

    architectures = ("decoder",)
    pads = True

    @dataclass
    class Config:
        """too_long: what becomes of a conversation of more than `data.sequence_length` tokens: an `error`,
        `drop`, or `truncate` after the last answer that fits; how much is lost is told at the start. packing:
        whether a sequence may hold several conversations. average: the loss is the mean over all learned
        `token`s, or over each `conversation`'s mean.
        """

        too_long: TooLong = "error"
        packing: bool = True
        average: Literal["token", "conversation"] = "token"

    @classmethod
    def check(cls, options: Config, config: RunConfig) -> None:
        data = config.data
        for is_wrong, problem in (
            (data.mock, "needs conversations; set data.mock to false, and data.sources to them"),
            (data.order != "documents", "conversations are shuffled one by one; leave data.order out"),
            (
                not data.document_aware,
                "a conversation must not see another one; set data.document_aware to true",
            ),
            (
                data.sampling_exponent is not None,
                "data.sampling_exponent is for several sources; leave it out",
            ),
        ):
            if is_wrong:
                raise ValueError(problem)
        for key, sources in _sources(data).items():
            if len(sources) != 1:
                raise ValueError(f"{key}: found {len(sources)}, expected one; prepare them together")

    @classmethod
    def shares(cls, options: Config, config: RunConfig) -> TokenShares:
        """Return the share of a sequence that is no padding: packed ones are taken as full."""
        if options.packing:
            return TokenShares()
        card = load_chat_card(config.data.sources[0].path)
        share = min(1.0, card.learned.size / card.conversations / config.data.sequence_length)
        return TokenShares(decoder=share, predicted=share, counted=share)

    def __init__(self, options: Any, config: RunConfig, vocabulary: Vocabulary) -> None:
        super().__init__(options, config, vocabulary)
        split = check_split(config.data)
        train = self._train = self._open(config.data.sources[0].path)
        bounds = np.cumsum([0.0, *split])
        self._parts = [train.between(first, last) for first, last in pairwise(bounds)]
        for name, share, places in zip(("train", VALID, "test"), split, self._parts, strict=True):
            if share > 0 and not len(places):
                raise UserError(
                    f"data.split: its share for {name} holds none of {len(train)} conversations; change it "
                    "or add data"
                )
        if split[1] > 0 and VALID in config.data.validation:
            raise UserError(
                f"data.validation: {VALID!r} is the second share of data.split; choose another name"
            )
        self._further = {
            name: self._open(sources[0].path) for name, sources in config.data.validation.items()
        }

    def samples_per_epoch(self) -> int:
        return len(PackedConversations(self, self._train, self._parts[0], "train", 1).plan(0))

    def batch(self, items: list[Item], indices: list[int]) -> Batch:
        """Return the batch of sequences with their padding."""
        return replace(stacked(items, indices), lengths_B=torch.stack([item["length"] for item in items]))

    def datasets(self, train_samples: int, validation_samples: int) -> Datasets:
        sources = _sources(self.config.data)
        paths = [each[0].path for each in sources.values()]
        identities = verify_sources(self.config.data, paths, self.vocabulary.of_data.size)
        once_per_machine(lambda stop: _verify_learned(self.config.data, identities))
        self._tell_cuts()
        train = PackedConversations(self, self._train, self._parts[0], "train", train_samples)
        if not validation_samples:
            return Datasets(train, {})
        evaluated = partial(PackedConversations, self, samples=validation_samples, repeats=False)
        validation: dict[str, Dataset[Item]] = {}
        if len(self._parts[1]):
            validation[VALID] = evaluated(self._train, self._parts[1], VALID)
        for name, conversations in self._further.items():
            validation[name] = evaluated(conversations, np.arange(len(conversations)), name)
        test = evaluated(self._train, self._parts[2], "test") if len(self._parts[2]) else None
        return Datasets(train, validation, test)

    def _open(self, path: str) -> Conversations:
        most = self.config.data.sequence_length
        return Conversations(path, most, self.options.too_long, self.vocabulary.size)

    def _tell_cuts(self) -> None:
        """Say on the first rank what long conversations have lost."""
        opened = {self.config.data.sources[0].path: self._train, **self._further}
        for path, conversations in opened.items():
            cuts = conversations.cuts
            if cuts.too_long and rank() == 0:
                print(
                    f"data {path!r}: {cuts.too_long:,} conversations have more than data.sequence_length "
                    f"{self.config.data.sequence_length} tokens: {cuts.too_long - cuts.dropped:,} are cut "
                    f"after an answer, {cuts.dropped:,} are left out; {cuts.tokens:,} tokens of answers are "
                    "not learned",
                    flush=True,
                )


def _sources(data: DataConfig) -> dict[str, Any]:
    """Return the sources of each set, by key."""
    return {"data.sources": data.sources, **{f"data.validation.{k}": v for k, v in data.validation.items()}}


def _verify_learned(data: DataConfig, identities: dict[str, str]) -> None:
    """Compare what is learned with its card and with the index, whose SHA-256 is given by path."""
    for path, identity in identities.items():
        card, learned = load_chat_card(path), ChatFiles(Path(path)).learned
        reads = data.verify == "full" and not is_stored(learned)
        whole = not reads or scan(learned)["sha256"] == card.learned.sha256
        if card.idx_sha256 != identity or not whole:
            raise UserError(
                f"data {str(learned)!r} is damaged or another dataset's; prepare the conversations again"
            )
