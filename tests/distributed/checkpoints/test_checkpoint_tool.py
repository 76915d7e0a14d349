"""Checkpoints of real runs: no damage goes unseen, whole weights are the model's."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megamoe.apps.checkpoints import verify
from megamoe.apps.checkpoints.stream import consolidate
from megamoe.checkpoint.manager import first_intact
from megamoe.errors import UserError
from megamoe.parallel import launch
from megamoe.train.trainer import Trainer
from tests.support.checkpoint_files import Tensors
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import ds_config, small_run

DAMAGES = 200


def train(**changes: Any) -> Tensors:
    """Job: one step and a checkpoint; this rank's weights."""
    trainer = Trainer(small_run(**changes))
    trainer.step()
    trainer.save()
    weights = {name: p.detach().clone() for name, p in trainer.engine.model.named_parameters()}
    trainer.close()
    return weights


@pytest.fixture(scope="module")
def trained(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tensors]]:
    """A checkpoint of 2 ranks, EP 2, ZeRO 1, and the weights of each rank."""
    output, layout = tmp_path_factory.mktemp("trained"), {"parallel__expert": 2}
    weights = pool.run(train, output=output, **layout, parallel__deepspeed=ds_config("zero1_fp32"), ranks=2)
    return output / "small" / "checkpoints" / "step_00000001", weights


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


def test_no_flipped_byte_and_no_missing_end_goes_unseen(pool: Pool, trained: Any) -> None:
    (unseen,) = pool.run(unseen_damages, trained[0], ranks=1)
    assert unseen == []


def test_the_weights_of_one_file_are_the_models(trained: tuple[Path, list[Tensors]], tmp_path: Path) -> None:
    path, (first, second) = trained
    consolidate(path, tmp_path / "weights")
    found = load_file(tmp_path / "weights" / "model.safetensors")
    about = json.loads((tmp_path / "weights" / "model.json").read_text())
    sizes = (tensor.numel() * (2 if ".experts." in name else 1) for name, tensor in first.items())
    assert about["parameters"]["total"] == sum(sizes)
    for name, tensor in first.items():
        whole = torch.cat([tensor, second[name]]) if ".experts." in name else tensor
        assert torch.equal(found[name], whole), name
