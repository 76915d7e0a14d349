"""Writing a dataset: texts to tokens, tokens to .bin and .idx, the counts of the token ids, the data card."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megamoe import __version__
from megamoe.apps.prepare.documents import Document
from megamoe.apps.prepare.index_writer import read_lengths, token_dtype, write_index
from megamoe.data.blocks import BLOCK_BYTES, block_sums
from megamoe.data.card import (
    BlockedCard,
    DataCard,
    DataFiles,
    FileCard,
    SourceCard,
    StepCard,
    TokenizerCard,
    save_checked,
)
from megamoe.data.tokenizers import Tokenizer, is_bytes, load_tokenizer
from megamoe.errors import UserError
from megamoe.io import real

Result = TypeVar("Result")


class EncodedDocuments(NamedTuple):
    """Documents as tokens, one after another, each ended by the end-of-document token."""

    tokens: np.ndarray  # [sum of lengths], the dtype of the .bin
    lengths: np.ndarray  # [documents], int64


def encode_documents(
    documents: Sequence[Document], tokenizer: Tokenizer, dtype: type[np.number]
) -> EncodedDocuments:
    """Return the tokens and lengths of documents, end-of-document tokens included.

    Raises:
        UserError: if a text is encoded to the end of a document, or to a reserved token.
    """
    texts = [document for document in documents if isinstance(document, str)]
    encoded = iter(tokenizer.encode_batch(texts))
    arrays = [next(encoded) if isinstance(document, str) else document for document in documents]
    lengths = np.array([len(tokens) + 1 for tokens in arrays], dtype=np.int64)
    ends = np.cumsum(lengths)
    joined = np.full(ends[-1], tokenizer.eod, dtype=dtype)
    for end, length, tokens in zip(ends.tolist(), lengths.tolist(), arrays, strict=True):
        joined[end - length : end - 1] = tokens
    if texts:
        tokenizer.check_text_only(np.delete(joined, ends - 1))
    return EncodedDocuments(joined, lengths)


def in_workers(
    encode: Callable[[Any, Tokenizer, Any], Result],
    batches: Iterable[Any],
    tokenizer: Tokenizer,
    option: Any,
    num_workers: int,
) -> Iterator[Result]:
    """Yield `encode(batch, tokenizer, option)` of each batch, in order, whatever the number of workers.

    Raises:
        UserError: if a worker dies.
    """
    if num_workers == 1:
        for batch in batches:
            yield encode(batch, tokenizer, option)
        return
    pool = ProcessPoolExecutor(
        num_workers, get_context("spawn"), initializer=_start_worker, initargs=(tokenizer.name,)
    )
    pending: deque[Future[Result]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_in_worker, encode, batch, option))
            if len(pending) > 2 * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            f"workers {num_workers}: one died, most likely for want of memory; try fewer workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_tokenizer: Tokenizer  # of a worker


def _start_worker(reference: str) -> None:
    global _tokenizer
    start_worker()
    _tokenizer = load_tokenizer(reference)


def start_worker() -> None:
    """Prepare this process, which was spawned to tokenize."""
    # The workers already use all cores; the parent alone handles Ctrl-C.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    """End this worker with its parent. A pool's workers would wait forever for a parent that was killed."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _in_worker(encode: Callable[[Any, Tokenizer, Any], Result], batch: Any, option: Any) -> Result:
    return encode(batch, _tokenizer, option)


LOCK = "lock"


@dataclass
class TextCounts:
    """What the documents of a dataset were: counted while they are read."""

    documents: int = 0
    empty_documents: int = 0  # skipped
    text_bytes: int = 0  # of the documents, as UTF-8; ready tokens have none
    sources: list[SourceCard] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)  # by reason, beside the empty ones

    def skip(self, reason: str, count: int) -> None:
        """Count documents that are left out."""
        self.skipped[reason] = self.skipped.get(reason, 0) + count

    def add(self, part: dict[str, Any]) -> None:
        """Add the counts of the documents that follow; part: as `dataclasses.asdict` gives them."""
        self.documents += part["documents"]
        self.empty_documents += part["empty_documents"]
        self.text_bytes += part["text_bytes"]
        self.sources += [SourceCard(**source) for source in part["sources"]]
        for reason, count in part["skipped"].items():
            self.skip(reason, count)

    def check(self, num_sources: int) -> None:
        """Raise a UserError if no document was found in so many files."""
        if not self.documents:
            left_out = "".join(f", {count} {reason}" for reason, count in self.skipped.items())
            empty = f"{self.empty_documents} empty documents"
            raise UserError(f"no text in {num_sources} files ({empty}{left_out}); name others")


def write_tokens(
    batches: Iterable[Sequence[Document]], tokenizer: Tokenizer, files: DataFiles, workers: int = 1
) -> np.ndarray:
    """Write .bin, .idx and the counts of documents, each ended by the end-of-document token.

    The memory that is used does not grow with the number of documents.

    Returns:
        Each token's count, int64 [vocabulary], end-of-document tokens included.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    encoded = in_workers(encode_documents, batches, tokenizer, dtype, workers)
    return write_encoded(encoded, tokenizer, files)


def write_encoded(encoded: Iterable[EncodedDocuments], tokenizer: Tokenizer, files: DataFiles) -> np.ndarray:
    """As `write_tokens`, for documents that are encoded."""
    dtype = token_dtype(tokenizer.vocab_size)
    counts_V = np.zeros(tokenizer.vocab_size, dtype=np.int64)

    def written() -> Iterator[np.ndarray]:
        with open(files.bin, "wb") as out:
            for tokens, lengths in encoded:
                out.write(tokens.astype(dtype, copy=False).tobytes())
                np.add(counts_V, np.bincount(tokens, minlength=tokenizer.vocab_size), out=counts_V)
                yield lengths

    write_index(files.idx, dtype, written())
    np.save(files.counts, counts_V, allow_pickle=False)
    return counts_V


def write_card(
    counts: TextCounts,
    tokenizer: Tokenizer,
    reference: str,
    files: DataFiles,
    counts_V: np.ndarray,
    steps: Sequence[StepCard] = (),
) -> DataCard:
    """Write and return the card of .bin and .idx; reference: of the tokenizer, as the card shall have it."""
    hashes = "\n".join(source.sha256 for source in counts.sources)
    card = DataCard(
        megamoe=__version__,
        documents=counts.documents,
        empty_documents=counts.empty_documents,
        tokens=int(counts_V.sum()),
        text_bytes=counts.text_bytes,
        dtype=token_dtype(tokenizer.vocab_size).__name__,
        tokenizer=TokenizerCard(
            reference=reference,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            fingerprint=tokenizer.fingerprint,
            special=dict(tokenizer.special.ids),
        ),
        num_sources=len(counts.sources),
        sources_sha256=hashlib.sha256(hashes.encode()).hexdigest(),
        sources=counts.sources,
        bin=blocked_card(files.bin),
        idx=file_card(files.idx),
        skipped=dict(sorted(counts.skipped.items())),
        steps=list(steps),
        largest_token=int(np.flatnonzero(counts_V)[-1]),
    )
    save_checked(asdict(card), files.card)
    return card


def lengths_of(files: DataFiles) -> np.ndarray:
    """Return the number of tokens of each document, int32 [documents]."""
    return np.concatenate(list(read_lengths(files.idx)))


def reference_of(tokenizer: Tokenizer, folder: Path, made: Path, published: Path) -> str:
    """Return how a card in `folder` names the tokenizer: relative if it is there, so that it can be moved.

    made: where a trained tokenizer is now; published: where it will be.
    """
    if is_bytes(tokenizer.name):
        return tokenizer.name
    path = published if Path(tokenizer.name) == made else Path(tokenizer.name)
    path, folder = real(path), real(folder)
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


@contextlib.contextmanager
def locked_folder(folder: Path, output: str, kept: Sequence[str] = (), worth: str = "") -> Iterator[None]:
    """Make a folder, lock it, and remove it at the end, also after an error. What lay in it is deleted.

    Args:
        kept: names in the folder that are not deleted at the start.
        worth: a glob; if a file matches it after an error, the folder is not removed.

    Raises:
        UserError: if another process has locked it: `output` is being written; for an OSError, in the block
            too: `output` cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / LOCK, "w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(f"output {output!r} is being written by another run") from error
            done = False
            try:
                for path in folder.iterdir():
                    if path.name in (LOCK, *kept):
                        continue
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                    else:
                        path.unlink()
                yield
                done = True
            finally:
                if done or not worth or not any(folder.glob(worth)):
                    shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"output {output!r} cannot be written: {error.strerror or error}; "
            "name a writable folder with enough free space"
        ) from error


def file_card(path: Path) -> FileCard:
    """Return the size and the SHA-256 of a file."""
    with open(path, "rb") as file:
        return FileCard(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def blocked_card(path: Path) -> BlockedCard:
    """Return the size, the SHA-256 and the checksums of the blocks of a file."""
    sha256, sums = block_sums(path, BLOCK_BYTES)
    return BlockedCard(path.stat().st_size, sha256, BLOCK_BYTES, sums)
