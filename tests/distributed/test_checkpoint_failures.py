"""What goes wrong when saving or loading ends in one line on every rank, and costs nothing that was saved."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megamoe.errors import UserError
from megamoe.train.trainer import Trainer
from tests.distributed.pool import Pool
from tests.distributed.runs import ds_config, run_steps, small_run

LAYOUT: dict[str, Any] = {"parallel__expert": 2, "parallel__deepspeed": ds_config("zero1_fp32")}


def save_on_a_full_disk(limited_rank: int | None, **changes: Any) -> str:
    """Job: one step, then a save that fails; returns what the user is told.

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


def try_to_start(**changes: Any) -> str:
    """Job: what the user is told when this run is started."""
    try:
        Trainer(small_run(**changes)).close()
    except UserError as error:
        return str(error)
    return "started"


def _assert_saved_state(folder: Path, *steps: int) -> None:
    names = [f"step_{step:08d}" for step in steps]
    expected = sorted([*names, *(["latest"] if steps else [])])
    assert sorted(path.name for path in folder.iterdir()) == expected


@pytest.mark.parametrize("limited_rank", [0, 1])
def test_one_rank_that_cannot_write_fails_the_save_on_all(
    pool: Pool, tmp_path: Path, limited_rank: int
) -> None:
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system takes root")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_full_disk(pool: Pool, small_disk: Path) -> None:
    resume = {**LAYOUT, "output": small_disk, "checkpoint__resume": "auto"}
    pool.run(run_steps, 1, True, **resume, ranks=2)
    filler = small_disk / "filler"
    with pytest.raises(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    os.truncate(filler, filler.stat().st_size - 100_000)  # enough to begin, not to end
    messages = pool.run(save_on_a_full_disk, None, **resume, ranks=2)
    assert len(set(messages)) == 1
    assert "No space left on device" in messages[0]
    _assert_saved_state(small_disk / "small" / "checkpoints", 1)
    filler.unlink()
    pool.run(run_steps, 1, True, **resume, ranks=2)
    _assert_saved_state(small_disk / "small" / "checkpoints", 1, 2)


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 2 ranks, EP 2, ZeRO 1, fp32."""
    output = tmp_path_factory.mktemp("saved")
    pool.run(run_steps, 1, True, output=output, **LAYOUT, ranks=2)
    return output / "small" / "checkpoints" / "step_00000001"


OTHERS = {
    "more ranks": (4, {}, "ranks 2"),
    "another EP": (2, {"parallel__expert": 1}, "parallel.expert 2"),
    "another ZeRO": (2, {"parallel__deepspeed": ds_config("zero2_fp32")}, "ZeRO stage 1"),
    "another precision": (2, {"parallel__deepspeed": ds_config("zero1_bf16")}, "precision fp32"),
    "another hidden size": (2, {"model__hidden_size": 64}, "model.hidden_size 32"),
    "more experts": (2, {"moe__num_experts": 16}, "moe.num_experts 8"),
    "another sequence length": (2, {"data__sequence_length": 16}, "data.sequence_length 32"),
    "another vocabulary": (2, {"model__vocab_size": 28}, "vocabulary 21"),
}


@pytest.mark.parametrize(("ranks", "changes", "named"), OTHERS.values(), ids=OTHERS.keys())
def test_a_checkpoint_of_another_run_is_refused(
    pool: Pool, saved: Path, tmp_path: Path, ranks: int, changes: dict[str, Any], named: str
) -> None:
    run = {**LAYOUT, "output": tmp_path, "checkpoint__resume": str(saved), **changes}
    messages = pool.run(try_to_start, **run, ranks=ranks)
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"{saved}: saved with {named}, this run has ")
    assert "\n" not in messages[0]


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 1000)


def _change_format(folder: Path) -> None:
    meta = json.loads((folder / "checkpoint.json").read_text())
    (folder / "checkpoint.json").write_text(json.dumps({**meta, "format": 99}))


def _spoil_meta(folder: Path) -> None:
    (folder / "checkpoint.json").write_text("{")


def _swap_experts(folder: Path) -> None:
    os.replace(folder / "dense.safetensors", folder / "experts_00001.safetensors")
    shutil.copy(folder / "experts_00001.safetensors", folder / "dense.safetensors")


DAMAGES = {
    "no meta": (_remove("checkpoint.json"), "is not a complete checkpoint"),
    "meta cut short": (_spoil_meta, "is not a complete checkpoint"),
    "another format": (_change_format, "checkpoint format 99"),
    "no dense file": (_remove("dense.safetensors"), "dense.safetensors: missing or damaged"),
    "no experts of rank 1": (_remove("experts_00001.safetensors"), "experts_00001.safetensors: missing"),
    "no state of rank 1": (_remove("rank_00001.safetensors"), "rank_00001.safetensors: missing"),
    "dense file cut short": (_cut("dense.safetensors"), "dense.safetensors: missing or damaged"),
    "state of rank 1 cut short": (_cut("rank_00001.safetensors"), "rank_00001.safetensors: missing or"),
    "a file in another's place": (_swap_experts, "experts.up is missing"),
    "no folder": (shutil.rmtree, "is not a complete checkpoint"),
}


@pytest.mark.parametrize(("damage", "told"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_is_refused_by_all_ranks(
    pool: Pool, saved: Path, tmp_path: Path, damage: Callable[[Path], None], told: str
) -> None:
    copy = tmp_path / saved.name
    shutil.copytree(saved, copy)
    damage(copy)
    run = {**LAYOUT, "output": tmp_path / "out", "checkpoint__resume": str(copy)}
    messages = pool.run(try_to_start, **run, ranks=2, timeout_s=30)
    assert len(set(messages)) == 1
    assert told in messages[0]
    assert "\n" not in messages[0]


def test_a_pointer_to_nothing_leads_to_the_newest_complete_one(
    pool: Pool, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved.parent, tmp_path / "small" / "checkpoints")
    (tmp_path / "small" / "checkpoints" / "latest").write_text("step_00000007")
    found = pool.run(run_steps, 1, **LAYOUT, output=tmp_path, checkpoint__resume="auto", ranks=2)
    assert found[0]["samples"][0][0] == [8]
