"""Averages of the weights of several checkpoints of a run, as a checkpoint without an optimizer's state."""

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megamoe.apps.checkpoints.stream import Fill, Stored, new_folder, one_rank, write_line, write_tensors
from megamoe.apps.checkpoints.verify import refuse_damaged
from megamoe.checkpoint.format.files import INDEX, META, shard_file
from megamoe.checkpoint.format.folder import candidates, find_checkpoints
from megamoe.checkpoint.format.meta import new_id
from megamoe.checkpoint.format.reader import MEAN, WEIGHT, CheckpointReader
from megamoe.errors import UserError
from megamoe.parallel.chunks import LocalChunk


def chosen(paths: Sequence[Path], last: int | None) -> list[Path]:
    """Return the checkpoints to average, in the order of their steps.

    paths: checkpoints, or one run's folder. last: of a run's folder, how many were saved last; None: all.

    Raises:
        UserError: for fewer than two, for `last` beside checkpoints, or if the run went back to an earlier
            step after some of them, which are of another branch then.
    """
    found, is_run = find_checkpoints(paths[0])
    if len(paths) > 1 or not is_run:
        if last is not None:
            raise UserError(f"--last {last} is for a run's folder; leave it out beside checkpoints")
        singles = [find_checkpoints(path) for path in paths]
        if runs := [path for path, (_, is_run) in zip(paths, singles, strict=True) if is_run]:
            raise UserError(f"{runs[0]}: a run's folder; name it alone, or name checkpoints")
        found = [path for (each,), _ in singles for path in (each,)]
    with ExitStack() as opened:
        steps = {path: opened.enter_context(CheckpointReader(path)).meta["step"] for path in found}
    taken = candidates(found[0].parent) if is_run else found
    if last is not None:
        if not 2 <= last <= len(taken):
            raise UserError(f"--last: found {last}, but {paths[0]} has {len(taken)} checkpoints; 2 or more")
        taken = taken[:last]
    left = [path.name for path in taken if is_run and steps[path] > steps[taken[0]]]
    if left:
        raise UserError(
            f"{paths[0]}: {', '.join(left)} were saved before the run went back to an earlier step, and are "
            f"not of the branch of {taken[0].name}; name the checkpoints, or lower --last"
        )
    ordered = sorted(taken, key=lambda path: steps[path])
    if len(set(ordered)) < 2:
        raise UserError(
            f"{paths[0]}: an average needs two or more different checkpoints, found {len(set(ordered))}"
        )
    return ordered


def _fill_with_means(readers: Sequence[CheckpointReader], local_chunks: Iterable[LocalChunk]) -> None:
    """Fill chunks with means of numbers with a fraction (sums are fp64), and the newest of all others."""
    for local in local_chunks:
        if not local.tensor.is_floating_point():
            readers[-1].fill([local])
            continue
        total = torch.zeros(local.tensor.shape, dtype=torch.float64)
        part = torch.empty_like(total)
        for reader in readers:
            reader.fill([LocalChunk(local.name, local.global_shape, local.chunk, part)])
            total += part
        local.tensor.copy_(total / len(readers))


def average(paths: Sequence[Path], path: Path) -> None:
    """Write the average of checkpoints, in the order of their steps, as a checkpoint of one file.

    It has the newest one's step and configuration, and no optimizer's state.

    Raises:
        UserError: if one is damaged or of another model, or `path` exists.
    """
    for each in paths:
        refuse_damaged(each)
    with ExitStack() as opened:
        readers = [opened.enter_context(CheckpointReader(each)) for each in paths]
        newest = readers[-1]
        for reader in readers[:-1]:
            _check_same(reader, newest)
        _write(newest, partial(_fill_with_means, readers), path)


def take_mean(source: Path, path: Path) -> None:
    """Write the exponential mean of the weights of a checkpoint (`optimizer.ema`), as `average` does.

    Buffers, and weights that are not trained, are those of the checkpoint.

    Raises:
        UserError: if it is damaged or has no such mean, or `path` exists.
    """
    refuse_damaged(source)
    with CheckpointReader(source) as reader:
        means = {WEIGHT + name.removeprefix(MEAN): name for name in reader.names(MEAN)}
        if not means:
            raise UserError(
                f"{source}: has no mean of the weights; train with optimizer.ema, or leave --ema out"
            )

        def fill(local_chunks: Iterable[LocalChunk]) -> None:
            reader.fill(replace(local, name=means.get(local.name, local.name)) for local in local_chunks)

        _write(reader, fill, path)


def _write(newest: CheckpointReader, fill: Fill, path: Path) -> None:
    """Write a checkpoint of one file with the names of the newest one's weights."""
    names = newest.names(WEIGHT)
    tensors = {name: Stored(newest.dtype(name), tuple(newest.shape(name))) for name in names}
    entries = {name: stored.index_entry() for name, stored in tensors.items()}
    index = {"tensors": entries, "shardings": newest.index["shardings"]}
    with new_folder(path, newest.path) as folder:
        write_tensors(folder / shard_file(0), tensors, fill)
        of_both = {"step": newest.meta["step"], "id": new_id()}
        write_line(folder / INDEX, json.dumps(of_both | index))
        write_line(folder / META, json.dumps(_meta(newest) | of_both, indent=1))


def _check_same(reader: CheckpointReader, newest: CheckpointReader) -> None:
    """Refuse a checkpoint whose weights have other names or shapes, or another function of them."""
    ours, theirs = ({name: it.shape(name) for name in it.names(WEIGHT)} for it in (reader, newest))
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise UserError(
                f"{reader.path}: {name.removeprefix(WEIGHT)} has shape {ours.get(name)}, but "
                f"{theirs.get(name)} in {newest.path}; average checkpoints of one model"
            )
    if reader.meta["config"].get("model") != newest.meta["config"].get("model"):
        raise UserError(
            f"{reader.path}: `model` is not that of {newest.path}; average checkpoints of one model"
        )


def _meta(newest: CheckpointReader) -> dict[str, object]:
    kept = ("format", "samples", "micro_batches", "skipped_steps", "tokens", "vocabulary", "config")
    plugins = newest.meta.get("plugins")
    return {
        **{key: newest.meta[key] for key in kept},  # type: ignore[literal-required]
        **({"plugins": plugins} if plugins else {}),
        **one_rank(newest.meta["layout"]["precision"]),
    }
