"""Errors in saving or loading end in one line on every rank, and saved checkpoints stay valid."""

import io
import os
import resource
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from megamoe.errors import UserError
from megamoe.parallel import launch
from megamoe.train.trainer import Trainer
from tests.distributed.faults.test_crashes import fill, small_disk
from tests.support.checkpoint_files import assert_same_bits, flip, read_tensors, seal
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import ds_config, run_steps, small_run

LAYOUT: dict[str, Any] = {"parallel__expert": 2, "parallel__deepspeed": ds_config("zero1_fp32")}


def save_on_a_full_disk(limited_rank: int | None, **changes: Any) -> str:
    """Job: one step, then a save that fails; return the user's message.

    limited_rank: the rank that may not write files of more than 10 kB; None: the disk itself is full.
    """
    trainer = Trainer(small_run(**changes))
    trainer.step()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if trainer.world.rank == limited_rank:
            sys.dont_write_bytecode = True  # Python 3.11 would leave a module's cache cut short for good
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        trainer.save()
    except UserError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        trainer.close()
    return "saved"


def try_each(runs: list[dict[str, Any]]) -> list[str]:
    """Job: start these runs, one after the other in one world; return the user's messages."""
    try:
        return [_try_to_start(**run) for run in runs]
    finally:
        launch.stop()


def _try_to_start(**changes: Any) -> str:
    try:
        trainer = Trainer(small_run(**changes))
    except UserError as error:
        return str(error)
    trainer.release()
    return "started"


def _assert_saved_state(folder: Path, *steps: int) -> None:
    names = [f"step_{step:08d}" for step in steps]
    expected = sorted([*names, *(["latest"] if steps else [])])
    assert sorted(path.name for path in folder.iterdir()) == expected


@pytest.mark.full
@pytest.mark.parametrize("limited_rank", [0, 1])
def test_one_rank_that_cannot_write_fails_save_on_all(pool: Pool, tmp_path: Path, limited_rank: int) -> None:
    resume = {**LAYOUT, "output": tmp_path, "checkpoint__resume": "auto"}
    folder = tmp_path / "small" / "checkpoints"
    folder.parent.mkdir()
    (folder.parent / "config.yaml").touch()  # by which a run's folder is known
    messages = pool.run(save_on_a_full_disk, limited_rank, **resume, ranks=2)
    assert len(set(messages)) == 1
    assert f"rank {limited_rank} cannot write in {folder}: " in messages[0]
    assert "File too large" in messages[0]
    assert "there is no earlier checkpoint" in messages[0]
    _assert_saved_state(folder)

    saved = pool.run(run_steps, 1, True, **resume, ranks=2)
    messages = pool.run(save_on_a_full_disk, limited_rank, **resume, ranks=2)
    assert f"the last good checkpoint is {folder / 'step_00000001'}" in messages[0]
    assert "\n" not in messages[0]
    _assert_saved_state(folder, 1)
    again = pool.run(run_steps, 1, True, **resume, ranks=2)
    assert again[0]["samples"] != saved[0]["samples"]
    _assert_saved_state(folder, 1, 2)


@pytest.mark.full
def test_a_full_disk(pool: Pool, tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        resume = {**LAYOUT, "output": disk, "checkpoint__resume": "auto"}
        pool.run(run_steps, 1, True, **resume, ranks=2)
        fill(disk)
        filler = disk / "filler"
        os.truncate(filler, filler.stat().st_size - 100_000)  # enough to begin, not to end
        messages = pool.run(save_on_a_full_disk, None, **resume, ranks=2)
        assert len(set(messages)) == 1
        assert "No space left on device" in messages[0]
        _assert_saved_state(disk / "small" / "checkpoints", 1)
        filler.unlink()
        pool.run(run_steps, 1, True, **resume, ranks=2)
        _assert_saved_state(disk / "small" / "checkpoints", 1, 2)


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 2 ranks, EP 2, ZeRO 1, fp32."""
    output = tmp_path_factory.mktemp("saved")
    pool.run(run_steps, 1, True, output=output, **LAYOUT, ranks=2)
    return output / "small" / "checkpoints" / "step_00000001"


def _swap_and_seal(folder: Path) -> None:
    os.replace(folder / SHARDS[0], folder / "aside")
    os.replace(folder / SHARDS[1], folder / SHARDS[0])
    os.replace(folder / "aside", folder / SHARDS[1])
    seal(folder)


def _remove_and_seal(folder: Path) -> None:
    (folder / SHARDS[1]).unlink()
    seal(folder)


SHARDS = ("shard_00000.safetensors", "shard_00001.safetensors")
CHECKSUM = "damaged, its SHA-256 is not the one in SHA256SUMS"
# Seen before the ranks are started, by the checksums, or, where these were renewed, while tensors are loaded.
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no folder": (shutil.rmtree, "is not a complete checkpoint"),
    "no index": (lambda folder: (folder / "index.json").unlink(), "missing or damaged (index.json: missing)"),
    "a bit of rank 1's": (
        lambda folder: flip(folder / SHARDS[1]),
        f"{SHARDS[1]}: {CHECKSUM}; no intact checkpoint is left",
    ),
    "never a file of rank 1": (_remove_and_seal, f"{SHARDS[1]}: missing or damaged"),
    "always in each other's place": (_swap_and_seal, ".safetensors: missing or damaged"),
}


def test_a_damaged_checkpoint_is_refused_by_all_ranks(pool: Pool, saved: Path, tmp_path: Path) -> None:
    copies = [tmp_path / str(place) / saved.name for place in range(len(DAMAGES))]
    for folder, (damage, _) in zip(copies, DAMAGES.values(), strict=True):
        shutil.copytree(saved, folder)
        damage(folder)
    run = {**LAYOUT, "output": tmp_path / "out"}
    runs = [{**run, "checkpoint__resume": str(folder)} for folder in copies]
    messages = pool.run(try_each, runs, ranks=2, timeout_s=60)
    for place, (case, (_, reported)) in enumerate(DAMAGES.items()):
        (message,) = {rank[place] for rank in messages}
        assert reported in message and str(copies[place]) in message, f"{case}: {message}"
        assert "\n" not in message


def resumed(**changes: Any) -> tuple[int, str]:
    """Job: resume, take one step and save; return the first step and the output."""
    with redirect_stdout(io.StringIO()) as text:
        trainer = Trainer(small_run(**changes))
    step = trainer.progress.step
    trainer.step()
    trainer.save()
    trainer.close()
    return step, text.getvalue()


def test_auto_resumes_from_the_newest_intact_checkpoint_and_reports_it(pool: Pool, tmp_path: Path) -> None:
    """Whoever of the ranks finds the damage."""
    run = {**LAYOUT, "output": tmp_path, "checkpoint__resume": "auto"}
    for step in range(2):
        assert pool.run(resumed, **run, ranks=2) == [(step, "")] * 2
    folder = tmp_path / "small" / "checkpoints"
    first, second = folder / "step_00000001", folder / "step_00000002"
    whole = read_tensors(second)
    flip(second / SHARDS[1])
    found = pool.run(resumed, **run, ranks=2)
    reported = f"damaged: {second}: {SHARDS[1]}: {CHECKSUM}\ngoing on from {first}\n"
    assert found == [(1, reported), (1, "")]
    assert_same_bits(read_tensors(second), whole)  # the step was done and saved again
    (second / "index.json").unlink()  # which is seen before the ranks are started
    (found, _) = pool.run(resumed, **run, ranks=2)
    assert found == (1, f"damaged: {second}: index.json: missing\ngoing on from {first}\n")
    for damaged in (first, second):
        flip(damaged / SHARDS[0])
    ((message,), (same,)) = pool.run(try_each, [run], ranks=2)
    assert message == same and message.startswith(f"{first}: {SHARDS[0]}: {CHECKSUM}; no intact checkpoint")


def resumed_where_a_rank_sees_nothing(output: Path, **changes: Any) -> str:
    """Job: return the user's message if only the first rank has the run's folder."""
    mine = output if os.environ["RANK"] == "0" else output / "elsewhere"
    mine.mkdir(exist_ok=True)
    os.chdir(mine)
    return try_each([{**changes, "output": "."}])[0]


def test_no_rank_restarts_from_step_0_if_another_resumes(pool: Pool, saved: Path) -> None:
    run = {"output": saved.parents[2], "checkpoint__resume": "auto"}
    messages = pool.run(resumed_where_a_rank_sees_nothing, **LAYOUT, **run, ranks=2, timeout_s=30)
    for message in messages:
        assert message.startswith(f"checkpoint to go on from: {saved.name} (")
        assert message.endswith(
            "on rank 0, none on rank 1; name as output=... a folder that all machines share"
        )
        assert "\n" not in message
