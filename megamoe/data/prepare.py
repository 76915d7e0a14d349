"""Preparing text: writes PREFIX.bin, PREFIX.idx, PREFIX.counts.npy, PREFIX.card.json and, if one is trained,
PREFIX.tokenizer.json.

Design choices:
- everything is written in a hidden folder beside the destination and renamed at the end, the card last:
  a killed run leaves nothing that looks finished, and the next run deletes what it left;
- a lock in that folder keeps two runs from writing the same output;
- what is written depends on the sources, their order and the tokenizer, not on the number of workers.
"""

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megamoe.data.card import DataCard, DataFiles, SourceCard
from megamoe.data.sources import Source, Tap, find_sources, read_documents
from megamoe.data.special import expand
from megamoe.data.tokenizers import (
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    load_with_special,
    train_bpe,
)
from megamoe.data.write import TextCounts, locked_folder, reference_of, write_card, write_tokens
from megamoe.errors import UserError

TRAIN = "train"
BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 1024
MOST_WORKERS, LARGEST_VOCABULARY = 512, 10**8


@dataclass(frozen=True)
class Preparation:
    """The options of tools/prepare_data.py."""

    output: str  # prefix of the files
    inputs: list[str] = field(default_factory=list)
    stdlib: bool = False
    tokenizer: str = ByteTokenizer.name  # or `train`
    vocab_size: int = 4096  # of a tokenizer that is trained
    special: str = ""  # the tokens that it reserves (special.expand)
    key: str = "text"  # of JSON lines
    workers: int = 1
    max_documents: int | None = None
    shuffle_files: int | None = None  # seed; a split then cuts through all kinds of files
    overwrite: bool = False
    progress: bool = True


def prepare(preparation: Preparation) -> DataCard:
    """Read, tokenize and write the data; return its card. Each document ends with the end-of-document token.

    Raises:
        UserError: for input that is missing, broken or empty, an output that exists or cannot be
            written, or a broken tokenizer. Nothing that looks finished is left then.
    """
    files = DataFiles(Path(preparation.output))
    _check(preparation, files)
    sources = find_sources(preparation.inputs, preparation.stdlib)
    if preparation.shuffle_files is not None:
        random.Random(preparation.shuffle_files).shuffle(sources)
    try:
        with locked_folder(files.partial, str(files.prefix)):
            partial = DataFiles(files.partial / files.prefix.name)
            tokenizer = _tokenizer(preparation, sources, partial)
            corpus = _Corpus(sources, preparation, "tokenize")
            counts_V = write_tokens(corpus.batches(), tokenizer, partial, preparation.workers)
            reference = reference_of(tokenizer, files.prefix.parent, partial.tokenizer, files.tokenizer)
            card = write_card(corpus.counts, tokenizer, reference, partial, counts_V)
            _publish(partial, files)
    except OSError as error:
        raise UserError(
            f"output {preparation.output!r} cannot be written: {error.strerror or error}; "
            "name a writable folder with enough free space"
        ) from error
    return card


def _check(preparation: Preparation, files: DataFiles) -> None:
    for name in ("workers", "max_documents"):
        value = getattr(preparation, name)
        if value is not None and value < 1:
            raise UserError(f"{name} {value}: expected at least 1")
    if preparation.workers > MOST_WORKERS:
        raise UserError(f"workers {preparation.workers}: expected at most {MOST_WORKERS}")
    if preparation.vocab_size > LARGEST_VOCABULARY:
        raise UserError(f"vocab_size {preparation.vocab_size}: expected at most {LARGEST_VOCABULARY:,}")
    if not files.prefix.name or preparation.output.endswith("/"):
        raise UserError(f"output {preparation.output!r} is a folder; expected a prefix such as data/corpus")
    if preparation.overwrite:
        return
    for path in (files.card, files.bin, files.idx, files.counts, files.tokenizer):
        if path.exists():
            raise UserError(f"output {str(path)!r} exists; choose another --output or add --overwrite")


class _Corpus:
    """The documents of all sources in order, with a progress bar and the counts for the card."""

    def __init__(self, sources: list[Source], preparation: Preparation, title: str) -> None:
        self._sources = sources
        self._preparation = preparation
        self._title = title
        self.counts = TextCounts()

    def __iter__(self) -> Iterator[str]:
        """Yield each document that is not blank, up to `max_documents`.

        A source is counted when it is finished.
        """
        total = sum(source.path.stat().st_size for source in self._sources)
        with tqdm(
            total=total, desc=self._title, unit="B", unit_scale=True, disable=not self._preparation.progress
        ) as bar:
            for source in self._sources:
                if self._is_full():
                    break
                yield from self._documents_of(source, bar.update)
        if not self.counts.documents:
            raise UserError(
                f"no text in {len(self._sources)} files ({self.counts.empty_documents} empty documents); "
                "name others"
            )

    def _documents_of(self, source: Source, advance: Callable[[int], Any]) -> Iterator[str]:
        before = self.counts.documents
        try:
            tap = Tap(source, advance)
        except OSError as error:
            raise UserError(f"{source.name}: cannot be read: {error.strerror}") from error
        with tap:
            for text in read_documents(source, tap, self._preparation.key):
                if not text.strip():
                    self.counts.empty_documents += 1
                    continue
                self.counts.documents += 1
                self.counts.text_bytes += len(text.encode("utf-8"))
                yield text
                if self._is_full():
                    break
            digest = tap.sha256()
            self.counts.sources.append(
                SourceCard(source.name, tap.num_bytes, digest, self.counts.documents - before)
            )

    def _is_full(self) -> bool:
        limit = self._preparation.max_documents
        return limit is not None and self.counts.documents >= limit

    def batches(self) -> Iterator[list[str]]:
        """Yield the documents in batches that are large enough for a worker."""
        batch: list[str] = []
        characters = 0
        for text in self:
            batch.append(text)
            characters += len(text)
            if characters >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
                yield batch
                batch, characters = [], 0
        if batch:
            yield batch


def _tokenizer(preparation: Preparation, sources: list[Source], partial: DataFiles) -> Tokenizer:
    if preparation.tokenizer != TRAIN:
        return load_with_special(preparation.tokenizer, preparation.special)
    texts = _Corpus(sources, preparation, "train tokenizer")
    train_bpe(texts, preparation.vocab_size, partial.tokenizer, expand(preparation.special))
    return load_tokenizer(str(partial.tokenizer))


def _publish(partial: DataFiles, files: DataFiles) -> None:
    """Rename the files to their final names. The old card is deleted first, the new one comes last."""
    files.card.unlink(missing_ok=True)
    files.tokenizer.unlink(missing_ok=True)
    for source, target in (
        (partial.tokenizer, files.tokenizer),
        (partial.bin, files.bin),
        (partial.idx, files.idx),
        (partial.counts, files.counts),
        (partial.card, files.card),
    ):
        if source.exists():
            with open(source, "rb") as file:
                os.fsync(file.fileno())
            os.replace(source, target)
