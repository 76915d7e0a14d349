"""Recorded runs and their replays: the same bits, under recomputation, at another layout, after a resume."""

import gc
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.apps.routing_record.record import file_name, read_rows
from megamoe.errors import UserError
from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import recorded_steps, small_run

STEPS = 3
# Without its jitter the router would choose others.
OTHER = {"scorer": "linear", "selector": {"name": "top_k", "k": 2}}
RUN: dict[str, Any] = {"train__global_batch_size": 4, "train__steps": STEPS, "moe__layers": {"every": 1}}


def trained(steps: int, **changes: Any) -> dict[str, Any]:
    """Steps of a run, its validation loss, and a sum over its weights; the world stays."""
    trainer = Trainer(small_run(**{**RUN, **changes}))
    try:
        found: dict[str, Any] = recorded_steps(trainer, steps)
        found["val"] = trainer.evaluate()
        found["weights"] = [weight.detach().clone() for weight in trainer.model.parameters()]
        if "save" in changes.get("name", ""):
            trainer.save()
    finally:
        trainer.release()
    del trainer
    gc.collect()
    return found


def refused(**changes: Any) -> str:
    try:
        trained(1, **changes)
    except UserError as error:
        return str(error)
    return "nothing was refused"


def on_one_rank(folder: Path) -> dict[str, Any]:
    """Job: a recorded run, its replays, a resumed record, and what is refused."""
    record, again, resumed = (str(folder / name) for name in ("record", "again", "resumed"))
    replay = {"output": folder, "moe__router": {**OTHER, "replay": record}}
    found: dict[str, Any] = {
        "recorded": trained(STEPS, output=folder, name="save", log__routing=record),
        "replayed": trained(STEPS, **replay, name="b", log__routing=again),
        "otherwise": trained(STEPS, output=folder, name="c", moe__router=OTHER),
        "recomputed": trained(
            STEPS, **replay, name="d", model__recompute="full", log__routing=str(folder / "recomputed")
        ),
    }
    # Recording goes on after a resume, and what an interrupted launch recorded later is replaced.
    first = {"output": folder, "name": "e-save", "log__routing": resumed}
    trained(1, **first)
    shutil.copyfile(
        folder / "record" / file_name(2, "train", 0), folder / "resumed" / file_name(9, "train", 0)
    )
    found["resumed"] = trained(STEPS - 1, **first, checkpoint__resume="auto")
    found["refused"] = [
        refused(output=folder, name="f", log__routing=record),
        refused(**{**replay, "seed": 7}, name="f"),
        refused(**replay, name="f", moe__num_experts=4),
        refused(**replay, name="f", data__sequence_length=16),
        refused(**replay, name="f", log__routing=record),
        refused(output=folder, name="f", moe__router={**OTHER, "replay": str(folder / "none")}),
    ]
    torn = folder / "torn"
    shutil.copytree(record, torn)
    os.truncate(torn / file_name(STEPS, "train", 0), 50)
    replay["moe__router"] = {**OTHER, "replay": str(torn)}
    found["refused"].append(refused(**replay, name="f"))
    found["up to the tear"] = trained(
        STEPS - 1, **replay, name="g", train__exit_after_steps=STEPS - 1, evaluation__batches=0
    )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("routing")
    return path


@pytest.fixture(scope="module")
def alone(pool: Pool, folder: Path) -> dict[str, Any]:
    (found,) = pool.run(on_one_rank, folder, ranks=1)
    return found


SEEN = ("lm_loss", "loss", "grad_norm", "weights")


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether two runs have the same bits."""
    pairs = [pair for word in SEEN for pair in zip(found[word], expected[word], strict=True)]
    alike = found["val"] == expected["val"] and chosen(found) == chosen(expected)
    return alike and all(
        torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs)) for mine, theirs in pairs
    )


def chosen(found: dict[str, Any], steps: int = STEPS) -> list[list[list[int]]]:
    return [sorted(rows.unique(dim=0).tolist()) for rows in found["chosen"][:steps]]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.full
def test_a_replay_chooses_what_was_recorded(alone: dict[str, Any], folder: Path) -> None:
    recorded = chosen(alone["recorded"])
    assert chosen(alone["otherwise"]) != recorded
    assert chosen(alone["replayed"]) == recorded == chosen(alone["recomputed"])
    assert files(folder / "again") == files(folder / "record") == files(folder / "recomputed")


@pytest.mark.full
def test_going_on_records_what_was_not_interrupted(alone: dict[str, Any], folder: Path) -> None:
    whole, parts = files(folder / "record"), files(folder / "resumed")
    training = [file_name(step, "train", 0) for step in range(1, STEPS + 1)]
    assert {name for name in parts if ".train." in name} == set(training)
    assert all(parts[name] == whole[name] for name in training)


@pytest.mark.full
def test_what_is_refused_is_one_line(alone: dict[str, Any], folder: Path) -> None:
    record = folder / "record"
    starts = [
        f"log.routing: {record} holds a record already; name another folder, or overwrite=true",
        f"moe.router.replay: {record} is a record of seed 1234, this run has 7; name a record of the same",
        f"moe.router.replay: {record} is a record of moe.num_experts 8, this run has 4; ",
        f"moe.router.replay: {record} is a record of data.sequence_length 32, this run has 16; ",
        f"log.routing: {record} is also moe.router.replay; ",
        f"moe.router.replay: {folder / 'none'} holds no record; expected the folder of log.routing",
        f"moe.router.replay: the last whole step of {folder / 'torn'} is 2, this launch trains to step 3; "
        "of the step after: step_00000003.train.00000.choices is torn or was changed: its checksum does "
        "not match",
    ]
    assert len(alone["refused"]) == len(starts)
    for line, start in zip(alone["refused"], starts, strict=True):
        assert line.startswith(start), line
    assert chosen(alone["up to the tear"]) == chosen(alone["recorded"], STEPS - 1)


def same_run(folder: Path) -> list[dict[str, Any]]:
    """Job: a recorded run with drawn choices, and replays of it with the same configuration."""
    record = str(folder / "sampled")
    router = {"selector": {"name": "sample", "k": 2}}
    found = [trained(STEPS, output=folder, name="h", log__routing=record, moe__router=router)]
    router["replay"] = record  # type: ignore[assignment]
    for name, recompute in (("i", "none"), ("j", "full")):
        found.append(trained(STEPS, output=folder, name=name, moe__router=router, model__recompute=recompute))
    return found


def test_the_same_run_has_the_same_bits(pool: Pool, tmp_path: Path) -> None:
    (found,) = pool.run(same_run, tmp_path, ranks=1)
    assert [same(each, found[0]) for each in found] == [True] * 3


def by_another_router(folder: Path) -> list[dict[str, Any]]:
    """Job: a recorded run, its replay by a router without jitter, and that router's own choices."""
    record = str(folder / "record")
    found = [trained(STEPS, output=folder, name="n", log__routing=record)]
    for name, router in (("o", {**OTHER, "replay": record}), ("p", OTHER)):
        found.append(trained(STEPS, output=folder, name=name, moe__router=router))
    return found


def test_another_router_replays_what_was_recorded(pool: Pool, tmp_path: Path) -> None:
    ((recorded, replayed, own),) = pool.run(by_another_router, tmp_path, ranks=1)
    for step in range(STEPS):
        assert torch.equal(replayed["chosen"][step], recorded["chosen"][step])
    assert not all(torch.equal(own["chosen"][step], recorded["chosen"][step]) for step in range(STEPS))


def on_two_ranks(folder: Path, layout: dict[str, Any]) -> list[dict[str, Any]]:
    """Job: a replay of one rank's record at a layout, its own record, and a replay of that."""
    mine = str(folder / f"two_{'_'.join(layout)}")
    found = []
    for name, replay, record in (("l", str(folder / "record"), mine), ("m", mine, None)):
        router = {**OTHER, "replay": replay}
        options = {"output": folder, "name": f"{name}_{'_'.join(layout)}", "parallel": layout}
        found.append(trained(STEPS, **options, moe__router=router, log__routing=record))
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [{"expert": 2}, {"tensor": 2}, {"expert": 2, "tensor": 2}, {"pipeline": 2}, {"context": 2}],
    ids=str,
)
def test_another_layout_replays_same_choices(pool: Pool, folder: Path, alone: Any, layout: Any) -> None:
    recorded = chosen(alone["recorded"])
    ranks = pool.run(on_two_ranks, folder, layout, ranks=2)
    for step in range(STEPS):
        together = torch.cat([found[0]["chosen"][step] for found in ranks])
        assert sorted(together.unique(dim=0).tolist()) == recorded[step]
    for first, again in ranks:
        assert same(again, first)
        assert first["lm_loss"] == pytest.approx(alone["replayed"]["lm_loss"], abs=1e-5)
    for step in range(1, STEPS + 1):
        mine = read_rows(folder / f"two_{'_'.join(layout)}", step, "train", 2)
        for one, other in zip(mine, read_rows(folder / "record", step, "train", 2), strict=True):
            assert torch.equal(one.index_T, other.index_T) and torch.equal(one.expert_N, other.expert_N)
