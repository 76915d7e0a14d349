"""A checkpoint saved at one layout, ZeRO stage and precision can be resumed at any other."""

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.parallel import launch
from megamoe.train.trainer import Trainer
from tests.support.checkpoint_files import Tensors, assert_same_bits, read_tensors
from tests.support.ranks.fp16 import with_fp16
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import PLAIN_FILES, ds_file, ds_variant, small_run

Run = dict[str, Any]
Found = dict[str, Any]
Sources = dict[str, tuple[Path, list[Found]]]  # a checkpoint, and the results of its run after it
STEPS = 2  # before the save, and after
# The score function's bias is a buffer, which learns outside the gradient.
RUN: Run = {
    "moe__router": {
        "scorer": {"name": "linear", "jitter": 0.1},
        "score_function": {"name": "sigmoid", "bias_update": 0.01},
    },
    # Tensor parallelism cuts sinks, these biases and these norms.
    "model__attention": {"query_key_norm": "whole", "sinks": True, "window": 5, "input_bias": True},
    "optimizer__lr": 1e-2,
    "train__global_batch_size": 4,
}
EP2, TP2, CUT_TWICE = {"expert": 2}, {"tensor": 2}, {"tensor": 2, "expert_tensor": 2}
TP2_EP2, EVERY_WAY = {"tensor": 2, "expert": 2}, {"tensor": 2, "expert": 2, "expert_tensor": 2}
DROPOUT: Run = {"model__hidden_dropout": 0.1}
LATENT: Run = {
    "model__latent": {"query_rank": 8, "key_value_rank": 6, "nope_size": 4, "rope_size": 2, "value_size": 5},
    "model__attention": {"sinks": True, "window": 5},  # without the norms and biases that it refuses
}
SCALE = 13  # of fp16: 2^13 is not the files' first one
# (ranks, layout, DeepSpeed file, what else)
Place = tuple[int, dict[str, Any], str, Run]
SOURCES: dict[str, Place] = {
    "fp32": (2, EP2, "zero1_fp32", {}),
    "bf16": (2, CUT_TWICE, "zero2_bf16", {}),
    "fp16": (2, EP2, "zero2_fp16", {}),
    "dropout": (2, EP2, "zero1_fp32", DROPOUT),
    "latent": (2, TP2, "zero1_fp32", LATENT),
    "bf16 of one": (1, {}, "zero0_bf16", {}),
    "cut fp32": (4, EVERY_WAY, "zero3_fp32", {}),
    "bf16 at ZeRO 3": (2, EP2, "zero3_bf16", {}),
}
Moves = list[tuple[str, Place]]
QUICK: Moves = [
    ("fp32", (4, EVERY_WAY, "zero1_fp32", {})),
    # Precision.
    ("bf16", (2, EP2, "zero3_fp32", {})),
    ("fp16", (2, TP2, "zero2_bf16", {})),
    # Random states.
    ("dropout", (4, {}, "zero0_fp32", DROPOUT)),
]
OTHERS: Moves = [
    ("cut fp32", (2, {"tensor": 2, "sequence": True, "expert": 2}, "zero0_fp32", {})),
    ("fp32", (1, {}, "zero2_bf16", {})),
    ("bf16 at ZeRO 3", (1, {}, "zero0_bf16", {})),
    ("fp16", (2, TP2, "zero3_fp16", {})),
    ("bf16", (2, {}, "zero1_fp16", {})),
    ("latent", (1, {}, "zero0_fp32", LATENT)),
    ("fp32", (2, TP2, "zero0_bf16", {})),
    ("fp32", (2, {}, "zero3_bf16", {})),
    ("bf16", (1, {}, "zero0_fp32", {})),
    ("bf16 of one", (2, CUT_TWICE, "zero3_bf16", {})),
    ("bf16 at ZeRO 3", (1, {}, "zero0_fp32", {})),
    ("fp16", (1, {}, "zero1_fp16", {})),
    ("fp16", (2, EP2, "zero2_bf16", {})),
    ("latent", (4, EVERY_WAY, "zero3_fp32", LATENT)),
    ("dropout", (1, {}, "zero0_fp32", DROPOUT)),
    ("dropout", (4, TP2_EP2, "zero2_fp32", DROPOUT)),
]


def go_on_each(runs: list[Run]) -> list[Found]:
    """Job: of several runs, one after the other: steps, a checkpoint, steps.

    Each shows the loss scale that it began with and the losses after its checkpoint. first: steps before it.
    """
    gc.freeze()  # what is imported need not be searched after each run
    try:
        with with_fp16():
            return [_go_on(**run) for run in runs]
    finally:
        launch.stop()


def _go_on(first: int, **changes: Any) -> Found:
    trainer = Trainer(small_run(**changes))
    scale = trainer.engine.loss_scale
    for _ in range(first):
        trainer.step()
    trainer.save()
    after = [trainer.step()[1]["train/lm_loss"] for _ in range(STEPS)]
    trainer.release()
    del trainer
    gc.collect()  # an engine and its parameters know each other
    return {"scale": scale, "after": after}


def run_at(place: Place, output: Path, **changes: Any) -> Run:
    """Return a run with a separate folder."""
    _, layout, file, other = place
    output.mkdir()
    own = {"parallel": layout, "parallel__deepspeed": ds_file(output, file), "output": output / "runs"}
    return {**RUN, **other, **own, **changes}


def run_all(pool: Pool, runs: list[tuple[Place, Run]]) -> list[list[Found]]:
    """Return each rank's results of each run; runs with equal numbers of ranks share a world."""
    found: dict[int, list[Found]] = {}
    for ranks in sorted({place[0] for place, _ in runs}):
        numbers = [number for number, (place, _) in enumerate(runs) if place[0] == ranks]
        by_rank = pool.run(go_on_each, [runs[number][1] for number in numbers], ranks=ranks, timeout_s=900)
        for place, number in enumerate(numbers):
            found[number] = [rank[place] for rank in by_rank]
    return [found[number] for number in range(len(runs))]


def checkpoint_of(run: Run) -> Path:
    return run["output"] / "small" / "checkpoints" / f"step_{STEPS:08d}"


@pytest.fixture(scope="module")
def sources(pool: Pool, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Sources:
    """All; in `make test` those of QUICK."""
    folder = tmp_path_factory.mktemp("sources")
    is_quick = not any(item.get_closest_marker("full") for item in request.session.items)
    taken = {source for source, _ in QUICK} if is_quick else set(SOURCES)
    chosen = {name: place for name, place in SOURCES.items() if name in taken}
    runs = []
    for number, place in enumerate(chosen.values()):
        run = run_at(place, folder / str(number), first=STEPS)
        if place[2].endswith("fp16"):
            scale = {"initial_scale_power": SCALE}
            run["parallel__deepspeed"] = ds_variant(folder / str(number), place[2], fp16=scale)
        runs.append((place, run))
    found = run_all(pool, runs)
    return {name: (checkpoint_of(runs[n][1]), found[n]) for n, name in enumerate(chosen)}


def move_all(pool: Pool, sources: Sources, moves: Moves, folder: Path) -> list[tuple[Path, list[Found]]]:
    """Resume each checkpoint, save it at once, and continue."""
    runs = [
        (place, run_at(place, folder / str(n), first=0, checkpoint__resume=str(sources[source][0])))
        for n, (source, place) in enumerate(moves)
    ]
    found = run_all(pool, runs)
    return [(checkpoint_of(run), shown) for (_, run), shown in zip(runs, found, strict=True)]


def assert_moved(
    source: str, place: Place, before: tuple[Path, list[Found]], after: tuple[Path, list[Found]]
) -> None:
    """Check that every weight, buffer and moment is bit-identical, and that the run continues as the other
    did.
    """
    (old, expected), (new, found) = before, after
    saved, moved = read_tensors(old), read_tensors(new)
    assert_same_bits(without_random(moved), without_random(saved))
    assert all(tensor.dtype == torch.float32 for tensor in without_random(saved).values())
    assert_random(saved, moved, SOURCES[source], place)
    exact = SOURCES[source][2].endswith("fp32") and place[2].endswith("fp32")
    for rank in found:
        assert rank["after"] == found[0]["after"] and all(map(math.isfinite, rank["after"]))
        if not place[3]:
            assert rank["after"] == pytest.approx(expected[0]["after"], rel=1e-5 if exact else 1e-2)


def without_random(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("random/")}


def assert_random(saved: Tensors, moved: Tensors, before: Place, after: Place) -> None:
    """Each data-parallel rank has the state of the one that saved; where there was none, one of its own,
    which is not that of a run's first step either."""
    (old_ranks, old_layout, *_), (ranks, layout, *_) = before, after
    old_tensor, tensor = old_layout.get("tensor", 1), layout.get("tensor", 1)
    states = [random_of(moved, rank) for rank in range(ranks)]
    for rank, state in enumerate(states):
        data_rank = rank // tensor
        if data_rank < old_ranks // old_tensor:
            taken = data_rank * old_tensor + min(rank % tensor, old_tensor - 1)
            assert_same_bits(state, random_of(saved, taken))
        else:
            begun = torch.Generator().manual_seed(small_run().seed + 1 + data_rank).get_state()
            others = [random_of(saved, 0), *states[: data_rank * tensor]]
            known = [begun, *(other["torch"] for other in others)]
            assert not any(state["torch"].equal(other) for other in known)


def random_of(tensors: Tensors, rank: int) -> Tensors:
    prefix = f"random/{rank:05d}/"
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    "moves", [pytest.param(QUICK, id="quick"), pytest.param(OTHERS, id="others", marks=pytest.mark.full)]
)
def test_a_run_resumes_at_another_layout(pool: Pool, sources: Sources, tmp_path: Path, moves: Moves) -> None:
    """The loss scale goes on in fp16, and begins where there was none."""
    for (source, place), moved in zip(moves, move_all(pool, sources, moves, tmp_path), strict=True):
        assert_moved(source, place, sources[source], moved)
        scales = {rank["scale"] for rank in moved[1]}
        if not place[2].endswith("fp16"):
            assert scales == {1.0}
        else:
            assert (scales == {2.0**SCALE}) == (source == "fp16") and scales != {1.0}


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, EP2),
    (2, CUT_TWICE),
    (4, {}),
    (4, {"expert": 4}),
    (4, {"expert_tensor": 4}),
    (4, TP2_EP2),
    (4, EVERY_WAY),
]


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_every_layout_and_file(pool: Pool, sources: Sources, tmp_path: Path, ranks: int, layout: Any) -> None:
    saved = ("fp32", "cut fp32", "bf16")
    moves: Moves = [(source, (ranks, layout, file, {})) for source in saved for file in PLAIN_FILES]
    found = move_all(pool, sources, moves, tmp_path)
    for (source, place), after in zip(moves, found, strict=True):
        assert_moved(source, place, sources[source], after)
