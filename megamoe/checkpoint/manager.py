"""Saving and loading the checkpoints of a run. A checkpoint is complete or absent, and loads at any layout.

A save writes into a folder with a temporary name, and renames it when all ranks are done. `latest` is updated
after that. Nothing is pickled.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megamoe.checkpoint.format import files
from megamoe.checkpoint.format.files import FORMAT, INDEX, META
from megamoe.checkpoint.format.folder import (
    DELETING,
    LATEST,
    REPLACED,
    SAVING,
    candidates,
    has_run_name,
    hide,
    inode_of,
    remove,
)
from megamoe.checkpoint.format.meta import Meta, new_id
from megamoe.checkpoint.format.reader import CheckpointReader
from megamoe.checkpoint.planning import Plan, fingerprint, plan_save
from megamoe.checkpoint.state import EngineState, load_random
from megamoe.checkpoint.writer import Save, Staging
from megamoe.errors import UserError
from megamoe.io import replace_file, sync
from megamoe.parallel.chunks import LocalChunk
from megamoe.parallel.consensus import (
    call_on_all,
    catch_error,
    first_problem,
    gather_from_ranks,
    largest_of_ranks,
    raise_any_error,
)
from megamoe.parallel.layout import Layout
from megamoe.parallel.placements import shardings
from megamoe.parallel.zero.engine import Engine
from megamoe.resilience.heartbeat import tick

RESUME_ELSEWHERE = (
    "name another one in checkpoint.resume, or start from scratch with checkpoint.resume=never and another "
    "name"
)


def first_intact(
    paths: list[Path],
    report: Callable[[str], None],
    way_out: str = RESUME_ELSEWHERE,
    replace: Callable[[Path, int], bool] | None = None,
) -> tuple[Path, list[Path]]:
    """Return the first intact checkpoint of the first rank's `paths`, and the damaged ones before it.

    Intact means that every byte is as it was saved. Collective: the ranks divide the files among them.
    report: called on the first rank with a line for each damaged checkpoint. way_out: ends the message.
    replace: called on every rank with a damaged checkpoint and the inode that its folder had; returns whether
    another copy is in its place.

    Raises:
        UserError: on every rank, if no checkpoint is intact.
    """
    broadcast: list[Any] = [paths]
    dist.broadcast_object_list(broadcast)
    rank, size = dist.get_rank(), dist.get_world_size()
    problem = ""
    damaged: list[Path] = []
    for path in broadcast[0]:
        inode = inode_of(path)
        found = first_problem(next(files.problems(path, rank, size), None))
        if found is None:
            return path, damaged
        problem = f"{path}: {found[1]}"
        if rank == 0:
            report(f"damaged: {problem}")
        replaced = replace is not None and first_problem("replaced" if replace(path, inode) else None)
        if replaced and first_problem(next(files.problems(path, rank, size), None)) is None:
            return path, damaged
        damaged.append(path)
    raise UserError(f"{problem}; no intact checkpoint is left to go on from: {way_out}")


class Checkpoints:
    """The checkpoints of one run, in `folder`. The newest `keep` of them are kept.

    background: whether `begin` returns while the files are still being written. is_needed: whether an older
    checkpoint must stay for now. damaged: the checkpoints that were found damaged. These, and those that a
    user renamed, are neither counted nor deleted.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        background: bool = False,
        is_needed: Callable[[Path], bool] = lambda path: False,
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.background = background
        self.is_needed = is_needed
        self.damaged: set[Path] = set()
        self._save: Save | None = None
        self._staging = Staging()
        self._state: EngineState | None = None
        self._plan: Plan | None = None
        self._fingerprint = 0
        self._deletion: threading.Thread | None = None

    def latest(self) -> Path | None:
        """Return the checkpoint that a resume takes, or None."""
        return next(iter(candidates(self.folder)), None)

    @property
    def under_way(self) -> bool:
        """Whether a save has begun and is not finished; the same on all ranks."""
        return self._save is not None

    @property
    def is_written(self) -> bool:
        """Whether this rank has written its part of the current save, or there is none."""
        return self._save is None or self._save.is_done

    def plan(self, engine: Engine) -> None:
        """Plan a save after the next step, so that one that must fail does so before the run. Collective.

        Raises:
            UserError: on every rank, if the chunks of all ranks overlap or do not fill their tensors.
        """
        self._state = EngineState(engine)
        local_chunks = call_on_all(self._state.planned_chunks)
        raise_any_error(catch_error(lambda: self._planned(local_chunks)))

    def begin(self, engine: Engine, step: int, state: dict[str, Any]) -> None:
        """Copy the state of `step` and start to write it. Collective.

        No save may be under way. state: plain data for checkpoint.json (`Meta`).

        Raises:
            UserError: on every rank, if any rank could not begin. The earlier checkpoints remain.
        """
        assert self._save is None
        final = self.folder / f"step_{step:08d}"
        temporary = self.folder / f"{SAVING}{final.name}"
        problem = catch_error(lambda: self._make_folder(temporary)) if engine.world.is_first else None
        self._raise_any_error(problem, temporary)
        if self._state is None or self._state.engine is not engine:
            self._state = EngineState(engine)
        groups = self._state.chunk_groups
        local_chunks: list[LocalChunk] = []
        copied: dict[str, Tensor] = {}
        problem = catch_error(lambda: local_chunks.extend(chunk for group in groups() for chunk in group))
        self._raise_any_error(problem, temporary)
        problem = catch_error(
            lambda: copied.update(self._staging.copy(groups(), self._planned(local_chunks)))
        )
        self._raise_any_error(problem, temporary)
        texts = self._texts(engine, step, state)
        self._save = Save(temporary, final, engine.world.rank)
        self._save.start(copied, texts)
        if not self.background:
            self._wait(self._save)
            self._staging = Staging()

    def finish(self) -> Path:
        """Wait until every rank has written, then publish the checkpoint and return its folder. Collective.

        Raises:
            UserError: on every rank, if any rank could not write. The earlier checkpoints remain.
        """
        save = self._save
        assert save is not None
        self._wait(save)
        self._save = None
        self._raise_any_error(save.problem, save.folder)
        sums = {name: digest for own in gather_from_ranks(save.sums) for name, digest in own.items()}
        problem = catch_error(lambda: self._publish(save, sums)) if dist.get_rank() == 0 else None
        self._raise_any_error(problem, save.folder)
        return save.final

    def _wait(self, save: Save) -> None:
        """Wait until every rank has written, in short collectives.

        The watchdogs of all ranks are told while the files of one that writes grow. Collective.
        """
        waits = True
        while waits:
            writes, grows = save.wait()
            waits, grows = map(bool, largest_of_ranks([float(writes), float(grows)]))
            if grows:
                tick()

    def _planned(self, local_chunks: list[LocalChunk]) -> Plan:
        """Return the last plan, or a new one if any rank's chunks have changed. Collective."""
        found = fingerprint(local_chunks)
        changed = "the chunks" if found != self._fingerprint else None
        if self._plan is None or first_problem(changed):
            self._plan, self._fingerprint = plan_save(local_chunks), found
        return self._plan

    def _texts(self, engine: Engine, step: int, state: dict[str, Any]) -> dict[str, object]:
        """Return the contents of the JSON files, by file name, on the first rank. Collective with stages."""
        sharding_by_name = {name: sharding.to_json() for name, sharding in shardings(engine.model).items()}
        if engine.layout.pipeline > 1:
            for of_rank in gather_from_ranks(sharding_by_name):
                sharding_by_name |= of_rank
        if not engine.world.is_first:
            return {}
        meta = {
            "format": FORMAT,
            "id": new_id(),
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": step,
            "layout": {**vars(engine.layout), "zero_stage": engine.stage, "precision": engine.precision},
            "loss_scaler": engine.loss_scaling.state(),
            **state,
        }
        assert self._plan is not None
        index = {"step": step, "id": meta["id"], "tensors": self._plan.tensors}
        return {META: meta, INDEX: {**index, "shardings": sharding_by_name}}

    def _make_folder(self, temporary: Path) -> None:
        """Make an empty folder to write in, and delete what killed saves have left."""
        self.close()
        for prefix in (SAVING, REPLACED, DELETING):
            for left in self.folder.glob(f"{prefix}*step_*"):  # also .deleting_replaced_step_...
                if prefix != REPLACED or left.with_name(left.name.removeprefix(REPLACED)).exists():
                    remove(left)
        temporary.mkdir(parents=True)

    def _publish(self, save: Save, sums: dict[str, str]) -> None:
        """Rename the written folder to its final name, update `latest`, and delete old checkpoints."""
        files.write_sums(save.folder, sums)
        sync(save.folder)
        replaced = save.final.with_name(f"{REPLACED}{save.final.name}")
        if save.final.exists():  # the same step, saved again after a resume from an earlier one
            remove(replaced)
            os.replace(save.final, replaced)
        os.replace(save.folder, save.final)
        sync(self.folder)
        replace_file(self.folder / LATEST, save.final.name.encode(), synced=True)
        sync(self.folder)
        self.damaged.discard(save.final)
        good = [path for path in candidates(self.folder) if path not in self.damaged and has_run_name(path)]
        old = [path for path in good[self.keep :] if path != save.final and not self.is_needed(path)]
        self._delete([*old, *([replaced] if replaced.exists() else [])])

    def _delete(self, paths: list[Path]) -> None:
        """Rename the folders at once, and delete the files in a thread, for there may be many."""
        self.close()
        hidden = []
        for path in paths:
            with suppress(FileNotFoundError):  # deleted by somebody else meanwhile
                hidden.append(hide(path))
        self._deletion = threading.Thread(target=remove, args=hidden, name="delete")
        self._deletion.start()

    def close(self) -> None:
        """Wait until the thread has deleted the old checkpoints."""
        if self._deletion is not None:
            self._deletion.join()

    def _raise_any_error(self, problem: str | None, temporary: Path) -> None:
        """Raise UserError on every rank if any rank has a problem. Collective."""
        found = first_problem(problem)
        if found is None:
            return
        rank, problem = found
        self._save = None
        if dist.get_rank() == 0:
            remove(temporary)
        dist.barrier()
        last = self.latest()
        kept = f"the last good checkpoint is {last}" if last else "there is no earlier checkpoint"
        raise UserError(f"checkpoint: rank {rank} cannot write in {self.folder}: {problem}; {kept}")


def load(reader: CheckpointReader, engine: Engine) -> bool:
    """Restore optimiser, loss scale and random states; return whether this rank's random states were saved.

    The model that the engine was made of must have the checkpoint's weights. Random states belong to the
    data-parallel rank: if there are more data-parallel ranks than were saved, the new ones have none.
    Collective.

    Raises:
        UserError: on every rank, if on any rank a file is missing or damaged, or a tensor is missing or has
            another shape.
    """
    raise_any_error(catch_error(lambda: EngineState(engine).load(reader)))
    engine.loss_scaling.restore(reader.meta["loss_scaler"])
    source = saved_random_rank(reader.meta, engine.layout, engine.world.rank)
    raise_any_error(
        None if source is None else catch_error(lambda: load_random(reader, source, engine.world.device))
    )
    return source is not None


def saved_random_rank(meta: Meta, layout: Layout, rank: int) -> int | None:
    """Return the rank of the saving run whose random states rank `rank` of `layout` takes, or None."""
    before = meta["layout"]
    tensor = before["tensor"]
    saved = Layout(
        before["ranks"], tensor, pipeline=before.get("pipeline", 1), context=before.get("context", 1)
    )
    if (saved.pipeline, saved.context) != (layout.pipeline, layout.context):
        return None
    stage, place = layout.pipeline_rank(rank), rank % layout.stage_ranks // layout.tensor
    if place >= saved.replicas:
        return None
    return stage * saved.stage_ranks + place * tensor + min(layout.tensor_rank(rank), tensor - 1)
