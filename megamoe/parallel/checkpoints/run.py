"""Checkpoints of a run: every rank's weights, optimiser state and random state, whole or not at all.

    checkpoints/step_00000100/
        checkpoint.json            step, position in the data, layout, configuration
        dense.safetensors          the model but its routed experts, written by rank 0; with tensor
                                   parallelism dense_00000.safetensors, ..., one of each tensor rank
        experts_00000.safetensors  the routed experts, one file of each rank that holds different ones
        rank_00000.safetensors     each rank's share of the optimiser, and its random states
    checkpoints/latest             the name of the newest complete one

Everything is written under a temporary name and renamed when all ranks are done; `latest` moves after
that. Nothing is pickled. A checkpoint is loaded at the layout that saved it.
"""

import json
import os
import shutil
from collections.abc import Set
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamoe.errors import UserError
from megamoe.parallel import random_state
from megamoe.parallel.agreement import agree, attempt, first_problem
from megamoe.parallel.checkpoints.files import (
    FORMAT,
    META,
    check_layout,
    dense_file,
    experts_file,
    layout,
    load_tensors,
    model_tensors,
    read_meta,
    save_tensors,
    split_state,
    sync,
    write_text,
)
from megamoe.parallel.engine import Engine
from megamoe.parallel.layout import Layout
from megamoe.parallel.zero.shards import Shard, whole_copies

LATEST = "latest"
ADAM_STATE = {"step", "exp_avg", "exp_avg_sq"}


class Checkpoints:
    """The checkpoints of one run, in `folder`, of which the newest `keep` stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def latest(self) -> Path | None:
        """The checkpoint that `latest` names, or the newest complete one where it names none; or None."""
        pointer = self.folder / LATEST
        named = self.folder / pointer.read_text().strip() if pointer.is_file() else None
        if named is not None and (named / META).is_file():
            return named
        complete = self._complete()
        return complete[-1] if complete else None

    def _complete(self) -> list[Path]:
        """By the time of saving: a run resumed from an earlier step has newer ones with smaller numbers."""
        found = [path for path in self.folder.glob("step_*") if (path / META).is_file()]
        return sorted(found, key=lambda path: (path / META).stat().st_mtime_ns)

    def _begin(self, temporary: Path) -> None:
        """An empty folder to write in; what killed saves have left goes."""
        for pattern in (".saving_step_*", ".replaced_step_*"):
            for left in self.folder.glob(pattern):
                shutil.rmtree(left, ignore_errors=True)
        temporary.mkdir(parents=True)

    def save(self, engine: Engine, step: int, state: dict[str, Any]) -> Path:
        """Write the checkpoint of `step`; `state` is plain data (JSON) that `load` hands back.

        Raises:
            UserError: on every rank, if any rank could not write; the earlier checkpoints stay.
        """
        final = self.folder / f"step_{step:08d}"
        temporary = self.folder / f".saving_step_{step:08d}"
        problem = None
        if engine.world.is_first:
            problem = attempt(lambda: self._begin(temporary))
        self._agree(problem, temporary, engine)
        problem = attempt(lambda: self._write(engine, temporary, step, state))
        self._agree(problem, temporary, engine)
        if engine.world.is_first:
            problem = attempt(lambda: self._publish(temporary, final))
        self._agree(problem, temporary, engine)
        return final

    def _write(self, engine: Engine, folder: Path, step: int, state: dict[str, Any]) -> None:
        rank, ranks = engine.world.rank, engine.layout
        dense, experts = split_state(engine.model)
        dense = whole_copies(dense, ranks.data_rank(rank) == 0)
        experts = whole_copies(experts, rank < ranks.expert_ranks)
        if dense:
            save_tensors(dense, folder / dense_file(ranks, rank))
        if rank == 0:
            meta = {
                "format": FORMAT,
                "step": step,
                "layout": layout(ranks, engine.stage, engine.precision),
                "trained": _trained_names(engine.model),
                "loss_scaler": engine.loss_scaler_state(),
                **state,
            }
            write_text(folder / META, json.dumps(meta, indent=1))
        if experts:
            save_tensors(experts, folder / experts_file(rank))
        mine = {**self._optimizer_tensors(engine), **random_state.capture(engine.world.device)}
        save_tensors(mine, folder / f"rank_{rank:05d}.safetensors")

    def _publish(self, temporary: Path, final: Path) -> None:
        replaced = final.with_name(f".replaced_{final.name}")
        if final.exists():  # the same step, saved again after a resume from an earlier one
            os.replace(final, replaced)
        os.replace(temporary, final)
        sync(self.folder)
        write_text(self.folder / LATEST, final.name)
        sync(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in self._complete()[: -self.keep]:
            if old != final:
                shutil.rmtree(old, ignore_errors=True)

    def _agree(self, problem: str | None, temporary: Path, engine: Engine) -> None:
        """Every rank learns whether any failed; then all end alike."""
        found = first_problem(problem)
        if found is None:
            return
        rank, problem = found
        if engine.world.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        dist.barrier()
        last = self.latest()
        kept = f"the last good checkpoint is {last}" if last else "there is no earlier checkpoint"
        raise UserError(f"checkpoint: rank {rank} cannot write in {self.folder}: {problem}; {kept}")

    def load_weights(self, path: Path, model: nn.Module, ranks: Layout, rank: int) -> None:
        """Restore a model's weights and buffers, before ZeRO cuts them.

        Raises:
            UserError: on every rank, if a file of any rank is missing or damaged, or a tensor is missing, of
                another shape, or one that this model has no place for.
        """
        agree(attempt(lambda: self._restore_weights(path, model, ranks, rank)))

    def _restore_weights(self, path: Path, model: nn.Module, ranks: Layout, rank: int) -> None:
        dense, experts = model_tensors(model)
        _copy_all(dense, load_tensors(path / dense_file(ranks, rank)), path)
        if experts:
            _copy_all(experts, load_tensors(path / experts_file(rank % ranks.expert_ranks)), path)

    def load(self, path: Path, engine: Engine) -> dict[str, Any]:
        """Restore optimiser and random states; returns the `state` that was saved.

        The engine was made of a model that has been through `load_weights`.

        Raises:
            UserError: on every rank, if the layout differs, a file of any rank is missing or damaged, or a
                tensor is missing, of another shape, or one that this run has no place for.
        """
        meta = read_meta(path)
        check_layout(path, meta, layout(engine.layout, engine.stage, engine.precision))
        agree(attempt(lambda: self._restore(path, engine, meta)))
        return meta

    def _restore(self, path: Path, engine: Engine, meta: dict[str, Any]) -> None:
        # Moments are told apart by their places alone, which follow from the order of the parameters.
        _check_order(path, meta.get("trained"), _trained_names(engine.model))
        mine = load_tensors(path / f"rank_{engine.world.rank:05d}.safetensors")
        self._restore_optimizer(engine, path, mine, began=meta["step"] > meta.get("skipped_steps", 0))
        engine.restore_loss_scaler(meta.get("loss_scaler", {}))
        random_state.restore(mine, engine.world.device)

    def _writer_of_shard(self, engine: Engine, shard: Shard) -> int:
        """The rank whose file holds this rank's state of the group; at ZeRO 0 replicas share one."""
        if engine.stage > 0:
            return engine.world.rank
        ranks = engine.layout
        return engine.world.rank % (ranks.expert_ranks if shard.of_experts else ranks.tensor)

    def _optimizer_tensors(self, engine: Engine) -> dict[str, Tensor]:
        state = engine.inner_optimizer.state
        own = {id(parameter) for parameter in engine.model.parameters()}  # written with the model already
        tensors: dict[str, Tensor] = {}
        for number, shard in enumerate(engine.optimizer_shards()):
            if self._writer_of_shard(engine, shard) != engine.world.rank:
                continue
            for place, parameter in enumerate(shard.parameters):
                mine = {name: torch.as_tensor(value) for name, value in state.get(parameter, {}).items()}
                if id(parameter) not in own:
                    mine["weight"] = parameter.detach()
                for name, value in mine.items():
                    tensors[f"optimizer/{number}/{place}/{name}"] = value.clone() if shard.fleeting else value
        return tensors

    def _restore_optimizer(self, engine: Engine, path: Path, mine: dict[str, Tensor], began: bool) -> None:
        """`began`: whether a step had been taken, so that each weight has its moments."""
        optimizer = engine.inner_optimizer
        own = {id(parameter) for parameter in engine.model.parameters()}
        files = {engine.world.rank: mine}
        left = {key for key in mine if key.startswith("optimizer/")}  # each rank takes all that it wrote
        for number, shard in enumerate(engine.optimizer_shards()):
            writer = self._writer_of_shard(engine, shard)
            if writer not in files:
                files[writer] = load_tensors(path / f"rank_{writer:05d}.safetensors")
            for place, parameter in enumerate(shard.parameters):
                prefix = f"optimizer/{number}/{place}/"
                found = {key[len(prefix) :]: t for key, t in files[writer].items() if key.startswith(prefix)}
                left -= {f"{prefix}{name}" for name in found}
                weight = found.pop("weight", None)
                if id(parameter) not in own:
                    _copy_tensors({"weight": parameter.data}, {"weight": weight}, path, prefix)
                optimizer.state[parameter] = _moments(path, prefix, found, parameter, began)
        _check_nothing_left(path, left)


def _moments(
    path: Path, prefix: str, found: dict[str, Tensor], parameter: Tensor, began: bool
) -> dict[str, Tensor]:
    """AdamW's state of one parameter, checked."""
    expected = ADAM_STATE if began else set()
    if set(found) != expected:
        raise UserError(
            f"{path}: {prefix} holds {sorted(found)}, expected {sorted(expected)}; "
            "resume from another checkpoint"
        )
    for name in found.keys() - {"step"}:
        _check_shape(path, prefix + name, found[name], parameter)
    return {name: value.to(parameter.device) for name, value in found.items()}


def _copy_tensors(
    targets: dict[str, Tensor],
    found: dict[str, Tensor | None] | dict[str, Tensor],
    path: Path,
    prefix: str = "",
) -> None:
    for name, target in targets.items():
        source = found.get(name)
        if source is None:
            raise UserError(f"{path}: {prefix}{name} is missing; the checkpoint is of another model")
        _check_shape(path, prefix + name, source, target)
        with torch.no_grad():
            target.copy_(source)


def _copy_all(targets: dict[str, Tensor], found: dict[str, Tensor], path: Path) -> None:
    _copy_tensors(targets, found, path)
    _check_nothing_left(path, found.keys() - targets.keys())


def _check_shape(path: Path, name: str, source: Tensor, target: Tensor) -> None:
    if source.shape != target.shape:
        raise UserError(
            f"{path}: {name} has shape {list(source.shape)}, this model needs {list(target.shape)}; "
            "resume with the configuration that saved it"
        )


def _check_nothing_left(path: Path, names: Set[str]) -> None:
    if names:
        raise UserError(
            f"{path}: this model has no place for {min(names)}; resume with the configuration that saved it"
        )


def _trained_names(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _check_order(path: Path, saved: list[str] | None, now: list[str]) -> None:
    """saved: None in earlier checkpoints, which do not have it."""
    for before, after in zip_longest(now if saved is None else saved, now):
        if before != after:
            raise UserError(
                f"{path}: the optimiser was saved with {before} where this run has {after}; resume with the "
                "configuration that saved it, in its order"
            )
