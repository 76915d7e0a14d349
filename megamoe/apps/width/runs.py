"""Short runs of one configuration at several widths, in a pool of processes."""

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

from megamoe.apps.command import LAUNCHER
from megamoe.config import RunConfig
from megamoe.errors import UserError

if TYPE_CHECKING:
    from megamoe.train.trainer import Trainer

Result = TypeVar("Result")
MUP, STANDARD = "muP", "standard"
# A run leaves nothing behind, and nothing but the rate differs from another one's.
SILENT = (
    "data.workers=0",
    "checkpoint.save_at_end=false",
    "log.report=false",
    "overwrite=true",
    "train.callbacks=none",
)


@dataclass(frozen=True)
class WidthRun:
    """A run of a width. kind: MUP or STANDARD. overrides: of the YAML."""

    config: Path
    kind: str
    width: int
    seed: int
    steps: int
    overrides: tuple[str, ...]


def width_overrides(config: RunConfig, width: int, base: int, kind: str) -> tuple[str, ...]:
    """Return the overrides that make a model of a width: FFN and latent sizes and the number of heads grow.

    Raises:
        UserError: naming the key, if a size would not be whole, or belongs to a group of layers.
    """
    model, moe = config.model, config.moe
    own = ("expert_ffn_hidden_size", "shared_expert_ffn_hidden_size", "latent_size")
    if any(getattr(group, key) for group in moe.groups for key in own):
        raise UserError(
            "moe.groups: has FFN or latent sizes of its own, which do not grow with the width; leave them out"
        )
    sizes = {
        "model.hidden_size": model.hidden_size,
        "model.ffn_hidden_size": model.ffn_hidden_size,
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_query_groups": model.num_query_groups,
        "moe.expert_ffn_hidden_size": moe.expert_ffn_hidden_size,
        "moe.shared_expert_ffn_hidden_size": moe.shared_expert_ffn_hidden_size,
        "moe.latent_size": moe.latent_size,
    }
    found = []
    for key, size in sizes.items():
        if size is None:
            continue
        grown = size * Fraction(width, model.hidden_size)
        if grown.denominator != 1:
            raise UserError(
                f"--widths: {width} makes {key} {size} of hidden size {model.hidden_size} {float(grown):g}, "
                "expected a whole number; choose another width"
            )
        found.append(f"{key}={grown}")
    return (*found, "model.mup=null" if kind == STANDARD else f"model.mup={{base: {base}}}")


def run_all(
    work: Callable[[WidthRun], Result],
    runs: Sequence[WidthRun],
    workers: int,
    advance: Callable[[WidthRun, Result], object],
) -> dict[WidthRun, Result]:
    """Return what `work` makes of each run, in so many processes; the wide runs begin first.

    advance: called with each run that is finished.

    Raises:
        UserError: the first of `work`, or if a process dies.
    """
    context = multiprocessing.get_context("spawn")
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    pool = ProcessPoolExecutor(min(workers, len(runs)), context, initializer=_begin, initargs=(threads,))
    found: dict[WidthRun, Result] = {}
    try:
        ordered = sorted(runs, key=lambda run: -run.width)
        futures = {pool.submit(work, run): run for run in ordered}
        for future in as_completed(futures):
            run = futures[future]
            found[run] = future.result()
            advance(run, found[run])
    except BrokenProcessPool:
        raise UserError(f"--workers {workers}: one died, most likely for want of memory; try fewer") from None
    finally:
        pool.shutdown(cancel_futures=True)
    return found


def _begin(threads: int) -> None:
    """Prepare a process of the pool, which ends with its parent; only errors of its runs are told."""
    from megamoe.apps.prepare.write import start_worker
    from megamoe.compat.startup import configure_libraries

    start_worker()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    for variable in LAUNCHER:  # a run has one rank
        os.environ.pop(variable, None)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    warnings.simplefilter("ignore")
    configure_libraries()


@contextmanager
def trainer_of(run: WidthRun, overrides: Sequence[str]) -> Iterator["Trainer"]:
    """Context with the trainer of a run, before its first step; overrides: those of the tool."""
    from megamoe.config import load_config
    from megamoe.train.trainer import Trainer

    with TemporaryDirectory() as folder:
        own = (f"train.steps={run.steps}", f"seed={run.seed}", f"output={folder}")
        trainer = Trainer(load_config(run.config, [*overrides, *run.overrides, *own, *SILENT]))
        try:
            yield trainer
        finally:
            trainer.close()
