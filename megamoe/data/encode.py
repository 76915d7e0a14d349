"""Tokenizing texts into arrays, in this process or in several. The order is always that of the texts.

Workers are spawned, not forked: the tokenizers' threads of the parent would not survive a fork. What
they import is kept light, so this file knows neither torch nor Megatron-Core.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import NamedTuple

import numpy as np

from megamoe.data.tokenizers import Tokenizer, load_tokenizer
from megamoe.errors import UserError


class Encoded(NamedTuple):
    """Documents as tokens, one after another, each ended by the end-of-document token."""

    tokens: np.ndarray  # [sum of lengths], the dtype of the .bin
    lengths: np.ndarray  # [documents], int64


def encode_texts(texts: list[str], tokenizer: Tokenizer, dtype: type[np.number]) -> Encoded:
    """Return the tokens and lengths of `texts`, end-of-document tokens included."""
    documents = [[*tokens, tokenizer.eod] for tokens in tokenizer.encode_batch(texts)]
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    return Encoded(np.concatenate([np.array(document, dtype=dtype) for document in documents]), lengths)


def encode_batches(
    batches: Iterable[list[str]], tokenizer: Tokenizer, dtype: type[np.number], num_workers: int
) -> Iterator[Encoded]:
    """Yield `encode_texts` of each batch, in order, whatever the number of workers.

    Raises:
        UserError: if a worker dies.
    """
    if num_workers == 1:
        for batch in batches:
            yield encode_texts(batch, tokenizer, dtype)
        return
    pool = ProcessPoolExecutor(
        num_workers, get_context("spawn"), initializer=_start_worker, initargs=(tokenizer.name, dtype)
    )
    pending: deque[Future[Encoded]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_encode_in_worker, batch))
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


_worker: tuple[Tokenizer, type[np.number]]


def _start_worker(reference: str, dtype: type[np.number]) -> None:
    global _worker
    start_worker()
    _worker = (load_tokenizer(reference), dtype)


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


def _encode_in_worker(texts: list[str]) -> Encoded:
    tokenizer, dtype = _worker
    return encode_texts(texts, tokenizer, dtype)
