"""Preparing text: writes PREFIX.bin, PREFIX.idx, PREFIX.counts.npy, PREFIX.card.json and, if one is trained,
PREFIX.tokenizer.json.

Design choices:
- everything is written in a hidden folder beside the destination and renamed at the end, the card last:
  a killed run leaves nothing that looks finished;
- large input is written in parts (`parts.py`): the same command goes on where a killed run stopped;
- a lock in that folder keeps two runs from writing the same output;
- what is written depends on the sources, their order and the tokenizer, not on the number of workers.
"""

import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megamoe.apps.prepare.documents import Document, Selection, Skipped
from megamoe.apps.prepare.index_writer import token_dtype
from megamoe.apps.prepare.new_tokenizers import load_with_special, train_bpe
from megamoe.apps.prepare.parts import FOLDER, RECORDS, Part, Record, cut, join_parts, unfinished, write_parts
from megamoe.apps.prepare.sources import Source, find_sources, open_source
from megamoe.apps.prepare.write import (
    TextCounts,
    locked_folder,
    reference_of,
    write_card,
    write_tokens,
)
from megamoe.data.card import DataCard, DataFiles
from megamoe.data.special import expand
from megamoe.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from megamoe.errors import UserError
from megamoe.io import sync

TRAIN = "train"
BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 1024
PART_BYTES = 1 << 26  # of sources; less is written in one piece
PARTS_VERSION = 3  # part of a part's key
LOG_INTERVAL_S = 20.0
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
    key: str = "text"  # the column of tables, the key of JSON lines
    ids_column: str | None = None  # of ready tokens, instead of text
    other_files: str = "refuse"  # those with unknown endings; or text
    bad_lines: str = "error"  # or skip: JSON lines that are no document
    workers: int = 1
    max_documents: int | None = None
    shuffle_files: int | None = None  # seed; a split then cuts through all kinds of files
    overwrite: bool = False
    progress: bool = True

    def selection(self, tokenizer: Tokenizer | None = None) -> Selection:
        """Return which documents are taken; tokenizer: the one that ready tokens must fit."""
        limits = (0, -1) if tokenizer is None else (tokenizer.vocab_size, tokenizer.eod)
        return Selection(self.key, self.ids_column, *limits, self.bad_lines)


def prepare(preparation: Preparation) -> DataCard:
    """Read, tokenize and write the data; return its card. Each document ends with the end-of-document token.

    Raises:
        UserError: for input that is missing, broken or empty, an output that exists or cannot be
            written, or a broken tokenizer. Nothing that looks finished is left then; finished parts are,
            for the next run.
    """
    _check(preparation)
    files = DataFiles(Path(preparation.output))
    unit = None if preparation.max_documents else PART_BYTES
    sources = find_sources(preparation.inputs, preparation.stdlib, unit, preparation.other_files)
    if preparation.shuffle_files is not None:
        random.Random(preparation.shuffle_files).shuffle(sources)
    new = DataFiles(files.partial / files.prefix.name)
    with locked_folder(files.partial, preparation.output, kept=(FOLDER, new.bin.name), worth=RECORDS):
        tokenizer = _tokenizer(preparation, sources, new)
        groups = [tuple(sources)] if preparation.max_documents else cut(sources, PART_BYTES)
        if len(groups) == 1:
            corpus = _Corpus(sources, preparation, "tokenize", preparation.selection(tokenizer))
            counts = corpus.counts
            counts_V = write_tokens(in_batches(corpus), tokenizer, new, preparation.workers)
        else:
            parts = _parts(groups, preparation, tokenizer, files.partial / FOLDER)
            counts, counts_V = _write_in_parts(parts, preparation, tokenizer, new)
        reference = reference_of(tokenizer, files.prefix.parent, new.tokenizer, files.tokenizer)
        card = write_card(counts, tokenizer, reference, new, counts_V)
        publish(new, files, tokenizer)
    return card


def _check(preparation: Preparation) -> None:
    for name in ("workers", "max_documents"):
        value = getattr(preparation, name)
        if value is not None and value < 1:
            raise UserError(f"{name} {value}: expected at least 1")
    if preparation.workers > MOST_WORKERS:
        raise UserError(f"workers {preparation.workers}: expected at most {MOST_WORKERS}")
    if preparation.vocab_size > LARGEST_VOCABULARY:
        raise UserError(f"vocab_size {preparation.vocab_size}: expected at most {LARGEST_VOCABULARY:,}")
    if not Path(preparation.output).name or preparation.output.endswith("/"):
        raise UserError(f"output {preparation.output!r} is a folder; expected a prefix such as data/corpus")
    if preparation.ids_column is not None and preparation.tokenizer == TRAIN:
        raise UserError("ids_column reads ready tokens; name the tokenizer that made them, not train")
    if preparation.overwrite:
        return
    files = DataFiles(Path(preparation.output))
    for path in (files.card, files.bin, files.idx, files.counts, files.tokenizer):
        if path.exists() and not _is_at(path, preparation.tokenizer):
            raise UserError(f"output {str(path)!r} exists; choose another --output or add --overwrite")


class _Corpus:
    """The documents of all sources in order, with a progress bar and the counts for the card."""

    def __init__(
        self, sources: list[Source], preparation: Preparation, title: str, selection: Selection
    ) -> None:
        self._sources = sources
        self._preparation = preparation
        self._title = title
        self._selection = selection
        self.counts = TextCounts()

    def __iter__(self) -> Iterator[Document]:
        """Yield `documents`, of which there must be one."""
        yield from self.documents()
        self.counts.check(len(self._sources))

    def documents(self) -> Iterator[Document]:
        """Yield each document that is not blank, up to `max_documents`.

        A source is counted when it is finished.
        """
        total = sum(source.size for source in self._sources)
        with progress(total, self._title, self._preparation.progress) as bar:
            for source in self._sources:
                if self._is_full():
                    break
                yield from self._documents_of(source, bar.update)

    def _documents_of(self, source: Source, advance: Callable[[int], Any]) -> Iterator[Document]:
        before = self.counts.documents
        with closing(open_source(source, self._selection, advance)) as reader:
            for found in reader.documents():
                if isinstance(found, Skipped):
                    self.counts.skip(found.reason, found.count)
                    continue
                if not (found.strip() if isinstance(found, str) else found.size):
                    self.counts.empty_documents += 1
                    continue
                self.counts.documents += 1
                self.counts.text_bytes += len(found.encode("utf-8")) if isinstance(found, str) else 0
                yield found
                if self._is_full():
                    break
            self.counts.sources.append(reader.card(self.counts.documents - before))

    def _is_full(self) -> bool:
        limit = self._preparation.max_documents
        return limit is not None and self.counts.documents >= limit


def progress(total: int, title: str, shown: bool, there: int = 0) -> Any:
    """Return a bar of bytes with their rate and the time that is left; in a log file, a line now and then.

    there: the bytes of an earlier run, which the rate leaves out.
    """
    interval = 0.1 if sys.stderr.isatty() else LOG_INTERVAL_S
    look = {"desc": title, "unit": "B", "unit_scale": True, "mininterval": interval}
    return tqdm(total=total, initial=there, disable=not shown, **look)


def in_batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield documents in batches that are large enough for a worker."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if characters >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _parts(
    groups: list[tuple[Source, ...]], preparation: Preparation, tokenizer: Tokenizer, folder: Path
) -> list[Part]:
    """Return the parts of the groups of sources; a part's key changes with its sources and its options."""
    folder.mkdir(exist_ok=True)
    parts = []
    for number, group in enumerate(groups):
        facts = [
            *(PARTS_VERSION, tokenizer.fingerprint, tokenizer.eod, tokenizer.vocab_size),
            asdict(preparation.selection(tokenizer)),
            [source.identity() for source in group],
        ]
        key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        parts.append(Part(DataFiles(folder / f"{number:05}"), group, key))
    return parts


def _write_in_parts(
    parts: list[Part], preparation: Preparation, tokenizer: Tokenizer, new: DataFiles
) -> tuple[TextCounts, np.ndarray]:
    """Write the parts that no earlier run has finished, and join all; return what they hold."""
    missing = unfinished(parts, new.bin)
    silent = replace(preparation, progress=False)
    total = sum(part.source_bytes for part in parts)
    there = total - sum(part.source_bytes for part in missing)
    with progress(total, "tokenize", preparation.progress, there) as bar:

        def advance(part: Part) -> None:
            bar.update(part.source_bytes)

        loaded.cache_clear()  # its file may be another one than that of an earlier preparation
        # With fewer parts than workers, the workers share one part at a time.
        shared = len(missing) < preparation.workers
        write = partial(_write_part, silent, tokenizer.name, preparation.workers if shared else 1)
        write_parts(missing, write, 1 if shared else preparation.workers, advance)
    counts = TextCounts()
    for part in parts:
        record = part.read()
        assert record is not None, "every part is finished"
        counts.add(record["facts"])
    counts.check(sum(len(part.sources) for part in parts))
    return counts, join_parts(parts, new, token_dtype(tokenizer.vocab_size))


loaded = lru_cache(maxsize=1)(load_tokenizer)  # which a process loads once for all of its parts


def _write_part(preparation: Preparation, reference: str, workers: int, part: Part) -> Record:
    tokenizer = loaded(reference)
    corpus = _Corpus(list(part.sources), preparation, "", preparation.selection(tokenizer))
    write_tokens(in_batches(corpus.documents()), tokenizer, part.files, workers)
    return asdict(corpus.counts)


def _tokenizer(preparation: Preparation, sources: list[Source], new: DataFiles) -> Tokenizer:
    if preparation.tokenizer != TRAIN:
        return load_with_special(preparation.tokenizer, preparation.special)
    corpus = _Corpus(sources, preparation, "train tokenizer", preparation.selection())
    texts = (document for document in corpus if isinstance(document, str))
    train_bpe(texts, preparation.vocab_size, new.tokenizer, expand(preparation.special))
    return load_tokenizer(str(new.tokenizer))


def publish(new: DataFiles, files: DataFiles, tokenizer: Tokenizer) -> None:
    """Rename the files to their final names. The old card is deleted first, the new one comes last.

    The tokenizer of an earlier dataset of this name is deleted, unless it is the new one's too.
    """
    names = [name for name in ("tokenizer", "bin", "idx", "counts", "card") if getattr(new, name).exists()]
    for name in names:
        sync(getattr(new, name))
    files.card.unlink(missing_ok=True)
    if not _is_at(files.tokenizer, tokenizer.name):
        files.tokenizer.unlink(missing_ok=True)
    for name in names:
        os.replace(getattr(new, name), getattr(files, name))


def _is_at(path: Path, tokenizer: str) -> bool:
    """Whether a tokenizer that the user named is this file."""
    return path.exists() and Path(tokenizer).exists() and path.samefile(tokenizer)
