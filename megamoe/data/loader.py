"""A data loader whose processes are replaced if they die; the batches stay the same.

Loader processes are forked, so that they share the memory-mapped data. They never use the accelerator, and
the trainer makes its stream before it uses CUDA; only a replacement of a dead process is forked later. A fork
of a process with many threads can fail, and the kernel may kill a loader when memory is short. A batch
depends on its number alone, so new processes can continue from there.
"""

import atexit
import contextlib
import faulthandler
import gc
import re
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from megamoe.compat.glibc import signal_at_parents_end
from megamoe.compat.torch_compat import loader_deaths_raise, loader_processes, shut_down_loader

PREFETCH_PER_WORKER = 4
# A loader process that hangs becomes an error, not a run that stands still.
WORKER_TIMEOUT_S = 540  # before train.hang_minutes, by default, ends the run with a shorter message
MOST_DEATHS = 3
DEATH_S = 2.0  # in which a process whose connection is broken ends
DEATH = re.compile(r"DataLoader worker .*(killed|exited|ended)")
STDERR = 2

Batch = TypeVar("Batch")


class Loader(Iterator[Batch]):
    """An iterator over batches.

    Args:
        indices_from: returns the items of each batch, from the n-th batch on.
        collate: makes a batch of its items.
        workers: loader processes; 0: items are read in this process.
        report: called with a line when a process has died and was replaced.

    Raises:
        RuntimeError: if a process hangs, or more of them die than MOST_DEATHS.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        indices_from: Callable[[int], Iterable[list[int]]],
        collate: Callable[[list[Any]], Batch],
        workers: int,
        report: Callable[[str], None],
    ) -> None:
        self._dataset, self._indices_from, self._collate = dataset, indices_from, collate
        self._workers, self._report = workers, report
        self._num_taken = self._num_deaths = 0
        self._iterators = [self._open()]  # one, or none if closed
        self._finalizer = weakref.finalize(self, _shut_down, self._iterators)
        # At exit multiprocessing waits for workers that are still there, so they must end before that:
        # what is registered last runs first, which finalize's own hook does not ensure.
        self._finalizer.atexit = False
        atexit.register(self._finalizer)

    def __next__(self) -> Batch:
        while True:
            if not self._iterators:
                raise StopIteration
            try:
                batch = self._take(self._iterators[0])
            except StopIteration:
                self.close()
                raise
            except RuntimeError as error:
                if not DEATH.search(str(error)) or self._num_deaths == MOST_DEATHS:
                    raise
                self._replace(str(error))
            else:
                self._num_taken += 1
                return batch

    def close(self) -> None:
        """End the loader processes. May be called twice."""
        self._finalizer()
        atexit.unregister(self._finalizer)

    def _open(self) -> Iterator[Batch]:
        workers = self._workers
        loader = DataLoader(
            self._dataset,
            batch_sampler=self._indices_from(self._num_taken),
            collate_fn=self._collate,
            num_workers=workers,
            prefetch_factor=PREFETCH_PER_WORKER if workers else None,
            multiprocessing_context="fork" if workers else None,
            timeout=WORKER_TIMEOUT_S if workers else 0,
            worker_init_fn=_begin_worker,
            # The loader draws a seed; from the default generator it would shift the run's random numbers.
            generator=torch.Generator(),
        )
        with loader_deaths_raise(), _no_collection():
            return iter(loader)

    def _take(self, iterator: Iterator[Batch]) -> Batch:
        with loader_deaths_raise():
            _raise_if_dead(iterator, 0)  # of those that died since the last batch
            try:
                return next(iterator)
            except (ConnectionError, EOFError):  # it died while it sent a batch's memory
                _raise_if_dead(iterator, DEATH_S)
                raise

    def _replace(self, reason: str) -> None:
        _shut_down(self._iterators)
        self._num_deaths += 1
        self._report(f"a loader process died (data.workers), another goes on in its place: {reason}")
        self._iterators.append(self._open())


def _begin_worker(_: int) -> None:
    """Ignore signals to the whole job (a preemption, Ctrl-C), which the training process handles.

    This process must end as soon as the training process ends: it has inherited its connections, and while
    they are open the other ranks do not notice the end. PyTorch's own check for the parent runs every 5
    seconds only.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal_at_parents_end(signal.SIGKILL)
    gc.freeze()  # what the training process has left for its collector is not for this one to destroy
    gc.enable()
    faulthandler.disable()  # the training process' own, over which PyTorch has put its handlers
    faulthandler.enable(STDERR)


def _raise_if_dead(iterator: Iterator[Any], wait_s: float) -> None:
    """Raise a RuntimeError if a loader process has ended, or ends within `wait_s` seconds."""
    for process in loader_processes(iterator):
        process.join(wait_s)
        if not process.is_alive():
            raise RuntimeError(f"DataLoader worker (pid {process.pid}) ended: {process.exitcode}")


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Do not collect garbage until a process that is forked within has left out what it inherited.

    Objects in reference cycles may own threads and connections that a fork does not have. To destroy them
    there can end the process with a segmentation fault.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _shut_down(iterators: list[Any]) -> None:
    """End the loader processes of the iterators, and empty the list."""
    for iterator in iterators:
        shut_down_loader(iterator)
    iterators.clear()
