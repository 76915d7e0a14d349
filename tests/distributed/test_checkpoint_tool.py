"""Checkpoints of real runs: no damage goes unseen, whole weights are the model's."""

import io
import json
import os
import random
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megamoe.checkpoint.manager import first_intact
from megamoe.checkpoint.tools import verify
from megamoe.checkpoint.tools.consolidate import consolidate
from megamoe.errors import UserError
from megamoe.parallel import launch
from megamoe.train.trainer import Trainer
from tests.distributed.pool import Pool
from tests.distributed.runs import ds_config, run_steps, small_run

RUN: dict[str, Any] = {
    "parallel__expert": 2,
    "parallel__deepspeed": ds_config("zero1_fp32"),
    "checkpoint__keep": 5,
}
DAMAGES = 200


def train(**changes: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Job: four steps, saved after the first two; the losses, and this rank's weights after the second."""
    trainer = Trainer(small_run(**changes))
    weights: dict[str, Tensor] = {}
    losses = []
    try:
        for step in range(1, 5):
            losses.append(trainer.step()[1]["train/lm_loss"])
            if step <= 2:
                trainer.save()
                weights = {name: p.detach().clone() for name, p in trainer.engine.model.named_parameters()}
    finally:
        trainer.close()
    return losses, weights


@pytest.fixture(scope="module")
def trained(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The checkpoint after step 2 of 2 ranks, EP 2, ZeRO 1 (that after step 1 beside it); what ranks tell."""
    output = tmp_path_factory.mktemp("trained")
    message = pool.run(train, output=output, **RUN, ranks=2)
    return output / "small" / "checkpoints" / "step_00000002", message


@pytest.fixture
def folder(trained: tuple[Path, list[Any]], tmp_path: Path) -> Path:
    """A copy of the run's checkpoints of steps 1 and 2 in a separate output folder."""
    copy = tmp_path / "small" / "checkpoints"
    for path in trained[0].parent.rglob("*"):
        target = copy / path.relative_to(trained[0].parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            target.write_bytes(path.read_bytes())
            os.utime(target, ns=(0, path.stat().st_mtime_ns))
    return copy


def unseen_damages(folder: Path) -> list[str]:
    """Job: which of many damages a resume or `verify` does not see, done and undone one after the other."""
    launch.start(launch.find_world(), timeout_minutes=1)
    unseen = []
    try:
        assert first_intact([folder], print) == (folder, [])
        for seed in range(DAMAGES):
            rng = random.Random(seed)
            path = rng.choice(sorted(folder.iterdir()))
            content = path.read_bytes()
            at = rng.randrange(len(content))
            flipped = bytes([content[at] ^ rng.randrange(1, 256)])
            path.write_bytes(content[:at] + (flipped + content[at + 1 :] if seed % 2 else b""))
            message = list(verify.problems(folder))
            if not message or not all(line.isprintable() for line in message):
                unseen.append(f"verify: {path.name}, byte {at} of {len(content)}, seed {seed}: {message}")
            try:
                first_intact([folder], lambda line: None)
                unseen.append(f"resume: {path.name}, byte {at} of {len(content)}, seed {seed}")
            except UserError as error:
                assert str(error).isprintable()
            path.write_bytes(content)
        assert list(verify.problems(folder)) == []
    finally:
        launch.stop()
    return unseen


def test_no_flipped_byte_and_no_missing_end_goes_unseen(pool: Pool, folder: Path) -> None:
    (unseen,) = pool.run(unseen_damages, folder / "step_00000002", ranks=1)
    assert unseen == []


def resume(**changes: Any) -> tuple[str, list[float]]:
    """Job: resume and take one step; return the user's message and the step's loss."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            losses = run_steps(1, checkpoint__resume="auto", **changes)["lm_loss"]
    except UserError as error:
        return str(error), []
    return printed.getvalue(), losses


def damage(path: Path, seed: int) -> None:
    content = bytearray(path.read_bytes())
    content[random.Random(seed).randrange(len(content))] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["shard_00001.safetensors", "index.json"])
def test_a_resume_uses_the_next_intact_checkpoint(
    pool: Pool, trained: tuple[Path, list[Any]], folder: Path, name: str
) -> None:
    losses = trained[1][0][0]
    damage(folder / "step_00000002" / name, seed=1)
    message = pool.run(resume, output=folder.parent.parent, **RUN, ranks=2)
    assert message[0][1] == message[1][1] == [losses[1]]  # step 2 anew
    assert f"damaged: {folder / 'step_00000002'}: {name}: damaged" in message[0][0]
    assert f"going on from {folder / 'step_00000001'}" in message[0][0]


def test_a_resume_with_none_intact_ends_in_one_line(pool: Pool, folder: Path) -> None:
    for step in (1, 2):
        damage(folder / f"step_{step:08d}" / "shard_00000.safetensors", seed=step)
    message = pool.run(resume, output=folder.parent.parent, **RUN, ranks=2)
    assert message[0] == message[1]
    assert "no intact checkpoint is left to go on from" in message[0][0] and message[0][0].isprintable()


def start_from(**changes: Any) -> str:
    """Job: start a run from weights; return the user's message."""
    try:
        Trainer(small_run(**changes)).close()
    except UserError as error:
        return str(error)
    return "started"


def test_damaged_weights_are_no_start(pool: Pool, folder: Path, tmp_path: Path) -> None:
    """One byte of a weight, in a file that one of the ranks has checked."""
    path = folder / "step_00000002"
    shard = path / "shard_00001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    changes = {**RUN, "output": tmp_path / "new", "checkpoint__init": {"path": str(path)}}
    message = pool.run(start_from, **changes, ranks=2)
    assert message[0] == message[1]
    assert "shard_00001.safetensors: damaged, its SHA-256" in message[0] and message[0].isprintable()
    shard.write_bytes(content)
    assert pool.run(start_from, **changes, ranks=2) == ["started", "started"]


def test_the_weights_of_one_file_are_the_models(trained: tuple[Path, list[Any]], tmp_path: Path) -> None:
    path, message = trained
    consolidate(path, tmp_path / "weights")
    found = load_file(tmp_path / "weights" / "model.safetensors")
    about = json.loads((tmp_path / "weights" / "model.json").read_text())
    (_, first), (_, second) = message
    assert about["parameters"]["total"] == sum(
        tensor.numel() * (2 if ".experts." in name else 1) for name, tensor in first.items()
    )
    for name, tensor in first.items():
        whole = torch.cat([tensor, second[name]]) if ".experts." in name else tensor
        assert torch.equal(found[name], whole), name
