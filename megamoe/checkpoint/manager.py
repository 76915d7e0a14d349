"""The checkpoints of a run: every rank's state, whole or not at all, to be loaded at any layout.

Everything is written under a temporary name and renamed when all ranks are done; `latest` moves after that.
Nothing is pickled.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.checkpoint.format import integrity
from megamoe.checkpoint.format.boxes import Piece
from megamoe.checkpoint.format.files import FORMAT, INDEX, META, sync, write_text
from megamoe.checkpoint.format.folder import (
    DELETING,
    LATEST,
    REPLACED,
    SAVING,
    candidates,
    hide,
    is_of_a_run,
    remove,
)
from megamoe.checkpoint.format.meta import Meta, RandomLayout
from megamoe.checkpoint.format.reader import Saved
from megamoe.checkpoint.placements import shardings
from megamoe.checkpoint.planning import Plan, agree_on_plan, fingerprint
from megamoe.checkpoint.state import EngineState, load_random
from megamoe.checkpoint.writer import Save, Staging
from megamoe.errors import UserError
from megamoe.parallel.consensus import catch_error, first_problem, gather_from_ranks, raise_any_error
from megamoe.parallel.layout import Layout
from megamoe.zero.engine import Engine


def first_intact(paths: list[Path], say: Callable[[str], None]) -> tuple[Path, list[Path]]:
    """Of the first rank's `paths` the first of which every byte is as it was saved, and those before it.

    Collective; the ranks deal out the files among them. say: told on the first rank of each that is damaged.

    Raises:
        UserError: on every rank, if none is.
    """
    told: list[Any] = [paths]
    dist.broadcast_object_list(told)
    rank, size = dist.get_rank(), dist.get_world_size()
    problem = ""
    damaged: list[Path] = []
    for path in told[0]:
        found = first_problem(integrity.first(integrity.problems(path, rank, size)))
        if found is None:
            return path, damaged
        damaged.append(path)
        problem = f"{path}: {found[1]}"
        if rank == 0:
            say(f"damaged: {problem}")
    raise UserError(
        f"{problem}; no intact checkpoint is left to go on from: name another one in checkpoint.resume, or "
        "begin anew with checkpoint.resume=never and another name"
    )


class Checkpoints:
    """The checkpoints of one run, in `folder`, of which the newest `keep` stay.

    background: whether `begin` returns while the files are still being written. damaged: those found so,
    which are neither counted nor deleted. Nor is one deleted that somebody has renamed.
    """

    def __init__(self, folder: Path, keep: int, background: bool = False) -> None:
        self.folder = folder
        self.keep = keep
        self.background = background
        self.damaged: set[Path] = set()
        self._save: Save | None = None
        self._staging = Staging()
        self._state: EngineState | None = None
        self._plan: Plan | None = None
        self._fingerprint = 0
        self._deletion: threading.Thread | None = None

    def latest(self) -> Path | None:
        """The checkpoint to go on from, or None."""
        return next(iter(candidates(self.folder)), None)

    @property
    def under_way(self) -> bool:
        """Whether a save has begun that is not finished; the same on all ranks."""
        return self._save is not None

    @property
    def is_written(self) -> bool:
        """Whether this rank has done its part of the save under way."""
        return self._save is None or self._save.is_done

    def begin(self, engine: Engine, step: int, state: dict[str, Any]) -> None:
        """Copy the state of `step` and write it; `state` is plain data (JSON) that `load` hands back.

        Collective. One that is still under way is finished first.

        Raises:
            UserError: on every rank, if any rank could not begin; the earlier checkpoints stay.
        """
        if self._save is not None:
            self.finish()
        final = self.folder / f"step_{step:08d}"
        temporary = self.folder / f"{SAVING}{final.name}"
        self._agree(catch_error(lambda: self._make(temporary)) if engine.world.is_first else None, temporary)
        if self._state is None or self._state.engine is not engine:
            self._state = EngineState(engine)
        mine = self._state
        pieces: list[Piece] = []
        copied: dict[str, Tensor] = {}
        self._agree(
            catch_error(lambda: pieces.extend(p for group in mine.pieces() for p in group)), temporary
        )
        self._agree(catch_error(lambda: copied.update(self._copy(mine, pieces))), temporary)
        texts = self._texts(engine, step, state) if engine.world.is_first else {}
        self._save = Save(temporary, final, engine.world.rank)
        if self.background:
            self._save.start(copied, texts)
        else:
            self._save.run(copied, texts)
            self._staging = Staging()

    def finish(self) -> Path:
        """Wait until every rank has written, then publish. Collective.

        Raises:
            UserError: on every rank, if any rank could not write; the earlier checkpoints stay.
        """
        save = self._save
        assert save is not None
        save.wait()
        self._save = None
        self._agree(save.problem, save.folder)
        sums = {name: digest for mine in gather_from_ranks(save.sums) for name, digest in mine.items()}
        problem = catch_error(lambda: self._publish(save, sums)) if dist.get_rank() == 0 else None
        self._agree(problem, save.folder)
        return save.final

    def _copy(self, state: EngineState, pieces: list[Piece]) -> dict[str, Tensor]:
        """What this rank writes of its pieces; by the last plan, if all ranks have the same as then."""
        mark = fingerprint(pieces)
        if self._plan is None or any_rank(mark != self._fingerprint):
            self._plan, self._fingerprint = agree_on_plan(pieces), mark
        return self._staging.copy(state.pieces(), self._plan)

    def _texts(self, engine: Engine, step: int, state: dict[str, Any]) -> dict[str, object]:
        layout = {
            **{name: getattr(engine.layout, name) for name in ("ranks", "tensor", "expert", "expert_tensor")},
            "zero_stage": engine.stage,
            "precision": engine.precision,
        }
        meta = {
            "format": FORMAT,
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": step,
            "layout": layout,
            "loss_scaler": engine.loss_scaler_state(),
            **state,
        }
        cuts = {name: sharding.to_json() for name, sharding in shardings(engine.model).items()}
        assert self._plan is not None
        return {META: meta, INDEX: {"tensors": self._plan.tensors, "shardings": cuts}}

    def _make(self, temporary: Path) -> None:
        """An empty folder to write in; what killed saves have left goes."""
        self.close()
        for prefix in (SAVING, REPLACED, DELETING):
            for left in self.folder.glob(f"{prefix}*step_*"):  # also .deleting_replaced_step_...
                if prefix != REPLACED or left.with_name(left.name.removeprefix(REPLACED)).exists():
                    remove(left)
        temporary.mkdir(parents=True)

    def _publish(self, save: Save, sums: dict[str, str]) -> None:
        integrity.write_sums(save.folder, sums)
        sync(save.folder)
        replaced = save.final.with_name(f"{REPLACED}{save.final.name}")
        if save.final.exists():  # the same step, saved again after a resume from an earlier one
            remove(replaced)
            os.replace(save.final, replaced)
        os.replace(save.folder, save.final)
        sync(self.folder)
        write_text(self.folder / LATEST, save.final.name)
        sync(self.folder)
        self.damaged.discard(save.final)
        good = [path for path in candidates(self.folder) if path not in self.damaged]
        old = [path for path in good[self.keep :] if path != save.final and is_of_a_run(path)]
        self._delete([*old, *([replaced] if replaced.exists() else [])])

    def _delete(self, paths: list[Path]) -> None:
        """Out of sight at once; the files in a thread, for there may be many."""
        self.close()
        hidden = []
        for path in paths:
            with suppress(FileNotFoundError):  # somebody else has deleted it meanwhile
                hidden.append(hide(path))
        self._deletion = threading.Thread(target=_remove_all, args=(hidden,), name="delete")
        self._deletion.start()

    def close(self) -> None:
        """Wait until what was to be deleted is."""
        if self._deletion is not None:
            self._deletion.join()

    def _agree(self, problem: str | None, temporary: Path) -> None:
        """Every rank learns whether any failed; then all end alike."""
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


def any_rank(mine: bool) -> bool:
    """Whether it is so on any rank; collective."""
    from deepspeed.accelerator import get_accelerator

    vote = torch.tensor([float(mine)], device=get_accelerator().current_device_name())
    dist.all_reduce(vote)
    return float(vote) > 0


def load(saved: Saved, engine: Engine) -> bool:
    """Restore optimiser, loss scale and random states; returns whether the latter were to be had.

    The engine was made of a model that has the checkpoint's weights. Random states are a data-parallel
    rank's: where there are more of them than saved, the new ones have none.

    Raises:
        UserError: on every rank, if a file of any rank is missing or damaged, or a tensor is missing or of
            another shape.
    """
    raise_any_error(catch_error(lambda: EngineState(engine).load(saved)))
    _restore_loss_scaler(engine, saved.meta)
    source = random_source(saved.meta, engine.layout, engine.world.rank)
    raise_any_error(
        None if source is None else catch_error(lambda: load_random(saved, source, engine.world.device))
    )
    return source is not None


def random_source(meta: Meta, now: Layout, rank: int) -> int | None:
    """The saved rank whose random states this one takes, or None."""
    before: RandomLayout = meta.get("random_layout", meta["layout"])
    data_rank, tensor_rank = now.data_rank(rank), now.tensor_rank(rank)
    if data_rank >= before["ranks"] // before["tensor"]:
        return None
    return data_rank * before["tensor"] + min(tensor_rank, before["tensor"] - 1)


def _restore_loss_scaler(engine: Engine, meta: Meta) -> None:
    if engine.precision == "fp16":
        engine.restore_loss_scaler(meta["loss_scaler"])


def _remove_all(paths: list[Path]) -> None:
    for path in paths:
        remove(path)
