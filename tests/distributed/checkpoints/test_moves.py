"""A run saved at one layout continues at any other with the same results."""

import gc
from pathlib import Path
from typing import Any

import pytest

from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import WORDS, Place, recorded_steps, run_each, small_run

BEFORE, AFTER = 2, 2  # steps
ALONE, EP2, EP4 = Place(), Place(2, expert=2), Place(4, expert=4)
TP2, BOTH = Place(2, tensor=2, sequence=True), Place(4, tensor=2, expert=2, expert_tensor=2)
LAYOUTS = (ALONE, EP2, EP4, TP2, BOTH)
# The batch is the same everywhere; weights of every kind of cut: vocabulary, heads, gated and biased FFNs.
RUN: dict[str, Any] = {
    "model__bias": True,
    "model__tie_embeddings": False,
    "model__hidden_dropout": 0.0,
    "train__global_batch_size": 4,
    "train__micro_batch_size": 1,
    "optimizer__schedule": "cosine",
}
Move = tuple[Place, Place]
# Pipeline stages and parts of sequences, in a model whose routers have buffers that every stage saves.
STAGED: dict[str, Any] = {
    **RUN,
    "model__num_layers": 4,
    "model__num_attention_heads": 4,
    "model__tie_embeddings": True,
    "model__multi_token_prediction": {"depth": 1},
    "moe__layers": {"at": [1, 4]},
    "moe__router": {
        "scorer": {"name": "linear"},
        "score_function": {"name": "sigmoid", "bias_update": 0.01},
        "selector": {"name": "top_k", "k": 2},
    },
}
PP2 = Place(4, pipeline=2, expert=2, zero=1)
PP4, INTERLEAVED = Place(4, pipeline=4), Place(2, pipeline=2, chunks=2)
CP2, BOTH_CUT = Place(4, context=2, tensor=2, sequence=True, zero=2), Place(4, pipeline=2, context=2)
STAGED_MOVES: list[Move] = [
    (PP2, ALONE),
    (PP2, PP4),
    (ALONE, INTERLEAVED),
    (PP4, CP2),
    (CP2, BOTH_CUT),
    (BOTH_CUT, PP2),
]


def name_of(place: Place) -> str:
    return "run_" + str(place).replace(" ", "_").replace(",", "")


def checkpoint(place: Place, output: Path) -> str:
    return str(output / name_of(place) / "checkpoints" / f"step_{BEFORE:08d}")


def save_and_go_on(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Job: of each run, steps, a checkpoint, and what the steps after it show."""
    found = []
    for changes in runs:
        trainer = Trainer(small_run(**changes))
        for _ in range(BEFORE):
            trainer.step()
        trainer.begin_save()  # is written while the next steps change what was copied
        found.append(recorded_steps(trainer, AFTER))
        trainer.saver.finish()
        gc.collect()
    return found


def run_moves(pool: Pool, output: Path, moves: list[Move], run: dict[str, Any]) -> None:
    """Save at all sources, load at all targets, compare."""
    went_on: dict[Place, dict[str, Any]] = {}
    for ranks in (1, 2, 4):
        sources = sorted({source for source, _ in moves if source.ranks == ranks}, key=str)
        runs = [{**run, **at.changes(output), "output": output, "name": name_of(at)} for at in sources]
        if not sources:
            continue
        went_on |= zip(sources, pool.run(save_and_go_on, runs, ranks=ranks, timeout_s=600)[0], strict=True)
    for ranks in (1, 2, 4):
        mine = [move for move in moves if move[1].ranks == ranks]
        if not mine:
            continue
        resumes = [{"steps": AFTER, "checkpoint__resume": checkpoint(source, output)} for source, _ in mine]
        runs = [{**run, **to.changes(output), **how} for (_, to), how in zip(mine, resumes, strict=True)]
        for rank in pool.run(run_each, runs, ranks=ranks, timeout_s=3600):
            for (source, target), found in zip(mine, rank, strict=True):
                for word in WORDS:
                    expected = pytest.approx(went_on[source][word], rel=1e-5)
                    assert found[word] == expected, f"{source} -> {target}: {word}"


@pytest.mark.full
def test_stages_and_parts_of_sequences(pool: Pool, tmp_path: Path) -> None:
    run_moves(pool, tmp_path, STAGED_MOVES, STAGED)
