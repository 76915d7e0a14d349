"""A run saved at one layout continues at any other with the same results."""

import gc
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from megamoe.parallel import launch
from megamoe.train.trainer import Trainer
from tests.distributed.pool import Pool
from tests.distributed.runs import ds_file, recorded_steps, small_run

BEFORE, AFTER = 2, 2  # steps
WORDS = ("lm_loss", "loss", "grad_norm")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "EP 2": (2, {"parallel__expert": 2}),
    "EP 4": (4, {"parallel__expert": 4}),
    "TP 2": (2, {"parallel__tensor": 2, "parallel__sequence": True}),
    "TP 2 x EP 2": (4, {"parallel__tensor": 2, "parallel__expert": 2, "parallel__expert_tensor": 2}),
}
STAGES = (0, 1, 2, 3)
# The batch is the same everywhere; weights of every kind of cut: vocabulary, heads, gated and biased FFNs.
RUN: dict[str, Any] = {
    "model__bias": True,
    "model__tie_embeddings": False,
    "model__hidden_dropout": 0.0,
    "train__global_batch_size": 4,
    "train__micro_batch_size": 1,
    "optimizer__schedule": "cosine",
}


@dataclass(frozen=True)
class Place:
    """The layout of a run, by its name, and its ZeRO stage."""

    layout: str
    zero: int

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout][0]

    def changes(self, folder: Path) -> dict[str, Any]:
        """Return the changes for `small_run`; folder: receives a separate DeepSpeed file."""
        path = ds_file(folder, f"zero{self.zero}_fp32")
        return {**RUN, **LAYOUTS[self.layout][1], "parallel__deepspeed": path}

    @property
    def name(self) -> str:
        return f"{self.layout}, ZeRO {self.zero}"


@dataclass(frozen=True)
class Move:
    """From one place to another."""

    saved_layout: str
    saved_zero: int
    layout: str
    zero: int

    @property
    def source(self) -> Place:
        return Place(self.saved_layout, self.saved_zero)

    @property
    def target(self) -> Place:
        return Place(self.layout, self.zero)

    @property
    def name(self) -> str:
        return f"{self.source.name} -> {self.target.name}"


def _move(source: Place, target: Place) -> Move:
    return Move(source.layout, source.zero, target.layout, target.zero)


PLACES = [Place(*choice) for choice in product(LAYOUTS, STAGES)]
ALL = [_move(source, target) for source, target in product(PLACES, PLACES) if source != target]

# Each layout of `make test` saves once and loads once; as do the stages. `make test-full` has every pair.
QUICK = [
    Move("1 rank", 0, "TP 2 x EP 2", 1),
    Move("EP 2", 1, "1 rank", 3),
    Move("TP 2", 3, "EP 2", 2),
    Move("TP 2 x EP 2", 2, "TP 2", 0),
]


def checkpoint(output: Path, place: Place) -> Path:
    return output / place.name / "checkpoints" / f"step_{BEFORE:08d}"


def save_and_go_on(places: list[Place], output: Path) -> dict[Place, dict[str, Any]]:
    """Job: at each place, steps, a checkpoint, and what the steps after it show."""
    found = {}
    gc.freeze()
    with TemporaryDirectory() as folder:
        for place in places:
            trainer = Trainer(small_run(output, name=place.name, **place.changes(Path(folder))))
            for _ in range(BEFORE):
                trainer.step()
            trainer.begin_save()  # is written while the next steps change what was copied
            found[place] = recorded_steps(trainer, AFTER)
            trainer.checkpoints.finish()
            gc.collect()
    launch.stop()
    return found


def load_and_go_on(moves: list[Move], output: Path) -> dict[Move, dict[str, Any]]:
    """Job: what the steps of each target show that begins with the source's checkpoint."""
    found = {}
    gc.freeze()
    with TemporaryDirectory() as folder:
        for move in moves:
            changes = move.target.changes(Path(folder))
            path = str(checkpoint(output, move.source))
            found[move] = recorded_steps(Trainer(small_run(checkpoint__resume=path, **changes)), AFTER)
            gc.collect()
    launch.stop()
    return found


def run_moves(pool: Pool, output: Path, moves: list[Move]) -> None:
    """Save at all sources, load at all targets, compare."""
    went_on: dict[Place, dict[str, Any]] = {}
    for ranks in (1, 2, 4):
        sources = sorted({move.source for move in moves if move.source.ranks == ranks}, key=PLACES.index)
        went_on |= pool.run(save_and_go_on, sources, output, ranks=ranks, timeout_s=600)[0]
    for ranks in (1, 2, 4):
        mine = [move for move in moves if move.target.ranks == ranks]
        for rank in pool.run(load_and_go_on, mine, output, ranks=ranks, timeout_s=3600):
            for move, found in rank.items():
                expected = went_on[move.source]
                for word in WORDS:
                    assert found[word] == pytest.approx(expected[word], rel=1e-5), f"{move.name}: {word}"


def test_each_layout_and_stage(pool: Pool, tmp_path: Path) -> None:
    run_moves(pool, tmp_path, QUICK)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pair(pool: Pool, tmp_path: Path, layout: str) -> None:
    """Each layout that saved, with every other."""
    run_moves(pool, tmp_path, [move for move in ALL if move.saved_layout == layout])
