"""`checkpoint average`: the mean of every weight, by hand; what it keeps, and what it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.apps.checkpoints import describe
from megamoe.checkpoint.format.reader import WEIGHT, CheckpointReader
from megamoe.config import load_config
from megamoe.train.loop import train
from tests.support import checkpoint
from tests.support.checkpoint_files import seal
from tests.support.refusals import Case, cases
from tests.support.tiny import restored_process, tiny, tool

Refused = Callable[..., str]


def call(*arguments: str | Path) -> int:
    code: int = tool("checkpoint").main(["average", *map(str, arguments)])
    return code


def weights(path: Path) -> dict[str, Tensor]:
    with CheckpointReader(path) as reader:
        return {name: reader.tensor(name) for name in reader.names(WEIGHT)}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Steps 1, 2 and 10, with the weights times 1, 2 and 6."""
    plain = checkpoint.tensors()
    folder = tmp_path / "run" / "checkpoints"
    for step, factor in ((1, 1), (2, 2), (10, 6)):
        scaled = {name: tensor * factor for name, tensor in plain.items()}
        monkeypatch.setattr(checkpoint, "tensors", lambda scaled=scaled: scaled)
        checkpoint.write(folder / f"step_{step:08}", step=step)
    monkeypatch.setattr(checkpoint, "tensors", lambda: plain)
    (folder / "latest").write_text("step_00000010")
    return tmp_path / "run"


@pytest.mark.parametrize(("options", "factor"), [([], 3.0), (["--last", "2"], 4.0)])
def test_weights_are_means(run: Path, tmp_path: Path, options: list[str], factor: float) -> None:
    output = tmp_path / "averaged"
    assert call(run, output, *options) == 0
    found = weights(output)
    plain = {name: tensor for name, tensor in checkpoint.tensors().items() if name.startswith(WEIGHT)}
    assert found.keys() == plain.keys()
    for name, tensor in plain.items():
        newest = not tensor.is_floating_point()  # a table of integers
        expected = tensor * 6 if newest else (tensor.double() * factor).to(tensor.dtype)
        torch.testing.assert_close(found[name], expected, msg=name)
        assert found[name].dtype == tensor.dtype
    assert describe.integrity_of(output) == describe.INTACT
    with CheckpointReader(output) as reader:
        assert reader.meta["step"] == 10 and reader.names() == reader.names(WEIGHT)


def test_a_branch_that_the_run_has_left_is_not_averaged(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """The run diverged, went back to step 2, and saved steps 3 and 4."""
    folder = run / "checkpoints"
    plain = checkpoint.tensors()
    for step, factor in ((3, 10), (4, 20)):
        scaled = {name: tensor * factor for name, tensor in plain.items()}
        monkeypatch.setattr(checkpoint, "tensors", lambda scaled=scaled: scaled)
        checkpoint.write(folder / f"step_{step:08}", step=step)
    (folder / "latest").write_text("step_00000004")
    assert call(run, tmp_path / "averaged", "--last", "2") == 0
    torch.testing.assert_close(weights(tmp_path / "averaged")["model/up"], plain["model/up"] * 15)
    line = "step_00000010 were saved before the run went back to an earlier step"
    assert line in refused("checkpoint", "average", str(run), str(tmp_path / "other"))


def test_named_checkpoints_are_taken_in_the_order_of_their_steps(run: Path, tmp_path: Path) -> None:
    steps = [run / "checkpoints" / f"step_{step:08}" for step in (10, 1)]
    assert call(*steps, tmp_path / "averaged") == 0
    torch.testing.assert_close(
        weights(tmp_path / "averaged")["model/up"], checkpoint.tensors()["model/up"] * 3.5
    )
    with CheckpointReader(tmp_path / "averaged") as reader:
        assert reader.meta["step"] == 10


@pytest.mark.parametrize("case", cases("checkpoints", "average: "))
def test_mistakes_are_one_line(
    run: Path, tmp_path: Path, refused: Refused, case: Case, expect_message: Callable[..., None]
) -> None:
    names = {"RUN": run, "STEP": run / "checkpoints" / "step_00000002", "NEW": tmp_path / "new"}
    expect_message(case, refused("checkpoint", *(names.get(each, each) for each in case["arguments"])))
    assert not (tmp_path / "new").exists()


def test_another_model_and_a_damaged_checkpoint_are_refused(
    run: Path, tmp_path: Path, refused: Refused
) -> None:
    step = run / "checkpoints" / "step_00000001"
    meta = checkpoint.load(step / "checkpoint.json")
    changed: dict[str, Any] = {**meta, "config": {**meta["config"], "model": {"num_layers": 9}}}
    checkpoint.dump(step / "checkpoint.json", changed)
    assert "damaged" in refused("checkpoint", "average", run, tmp_path / "new")
    seal(step)
    assert "`model` is not that of" in refused("checkpoint", "average", run, tmp_path / "new")


def test_a_run_starts_from_an_average(tmp_path: Path) -> None:
    """The mean of two checkpoints of a real run, and a run whose first validation is of these weights."""
    where = f"output={tmp_path}"
    with restored_process():
        train(tiny("name=a", where, "checkpoint.every=2", "train.steps=4", "optimizer.lr=0.1"))
        assert call(tmp_path / "a", tmp_path / "mean") == 0
        init = f"checkpoint.init.path={tmp_path / 'mean'}"
        train(tiny("name=b", where, init, "train.steps=1", "optimizer.lr=1e-30", "optimizer.weight_decay=0"))
    steps = [weights(tmp_path / "a" / "checkpoints" / f"step_0000000{step}") for step in (2, 4)]
    found = weights(tmp_path / "b" / "checkpoints" / "step_00000001")
    for name, tensor in found.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, (steps[0][name] + steps[1][name]) / 2, msg=name)
    assert load_config(tmp_path / "b" / "config.yaml").checkpoint.init.path == str(tmp_path / "mean")
