"""Saving in the background: what is written, when it counts as saved, what happens if a rank cannot write."""

import os
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megamoe.apps.checkpoints import verify
from megamoe.checkpoint import writer
from megamoe.checkpoint.format.meta import read_index
from megamoe.checkpoint.format.reader import CheckpointReader
from megamoe.errors import UserError
from megamoe.train.loop import train
from megamoe.train.trainer import Trainer
from tests.support.checkpoint_files import seal
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import ds_config, run_steps, small_run

LAYOUT: dict[str, Any] = {"parallel__expert": 2, "parallel__deepspeed": ds_config("zero1_fp32")}
LARGER: dict[str, Any] = {"model__hidden_size": 128, "moe__expert_ffn_hidden_size": 128}


def written_by_a_save(**changes: Any) -> tuple[int, int]:
    """Job: (bytes that this process gave to write calls during one save, bytes of the model's states)."""
    trainer = Trainer(small_run(**LAYOUT, **LARGER, **changes))
    trainer.step()
    before = _bytes_written()
    trainer.save()
    after = _bytes_written()
    parameters = sum(
        parameter.numel() / (1 if ".experts." in name else 2)  # the others are on both ranks
        for name, parameter in trainer.engine.model.named_parameters()
    )
    trainer.close()
    return after - before, round(12 * parameters)


def _bytes_written() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def test_a_save_writes_little_more_than_what_it_saves(pool: Pool, tmp_path: Path) -> None:
    """Weights once, in fp32, and two moments: 12 bytes a parameter, over both ranks."""
    found = pool.run(written_by_a_save, output=tmp_path, ranks=2)
    written, states = (sum(values) for values in zip(*found, strict=True))
    assert states > 2e6
    assert states < written < 1.1 * states
    assert max(mine for mine, _ in found) < 0.6 * written  # dealt out evenly


def steps_beside_a_slow_save(slow_rank: int, **changes: Any) -> list[tuple[bool, list[str]]]:
    """Job: after each of three steps (whether this rank has written, what the folder shows); the slow rank
    writes after the second. In the end, what it shows when the save is finished."""
    trainer = Trainer(small_run(**LAYOUT, **changes))
    trainer.step()
    go_on, original = threading.Event(), writer.save_file
    shown = []

    def slow(*args: Any, **kwargs: Any) -> None:
        if trainer.world.rank == slow_rank:
            go_on.wait(30)
        original(*args, **kwargs)

    with mock.patch.object(writer, "save_file", slow):
        trainer.begin_save()
        for number in range(3):
            trainer.step()
            if number == 1:
                go_on.set()
                save = trainer.saver.checkpoints._save
                assert save is not None
                while save.wait()[0]:
                    pass
            shown.append((trainer.saver.checkpoints.is_written, _names(trainer)))
    trainer.saver.checkpoints.finish()
    trainer.saver.checkpoints.close()
    shown.append((True, _names(trainer)))
    trainer.close()
    return shown


def _names(trainer: Trainer) -> list[str]:
    return sorted(path.name for path in trainer.folder.checkpoints.iterdir())


@pytest.mark.parametrize("slow_rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_training_goes_on_and_the_checkpoint_appears_when_all_have_written(
    pool: Pool, tmp_path: Path, slow_rank: int
) -> None:
    shown = pool.run(steps_beside_a_slow_save, slow_rank, output=tmp_path, ranks=2)[slow_rank]
    under_way = [".saving_step_00000001"]
    assert shown[:3] == [(False, under_way), (True, under_way), (True, under_way)]
    assert shown[3][1] == ["latest", "step_00000001"]
    again = pool.run(run_steps, 1, output=tmp_path, checkpoint__resume="auto", **LAYOUT, ranks=2)
    assert again[0]["samples"][0][0] == [8]


def train_where_a_rank_cannot_write(rank: int, **changes: Any) -> str:
    """Job: return the user's message if one rank's second save fails in the background."""
    calls, original = [0], writer.save_file

    def failing(*args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(28, "No space left on device")
        original(*args, **kwargs)

    patched = failing if int(os.environ["RANK"]) == rank else original
    with mock.patch.object(writer, "save_file", patched):
        try:
            train(small_run(**LAYOUT, **changes))
        except UserError as error:
            return str(error)
    return "done"


def test_a_rank_that_cannot_write_ends_the_run_and_the_last_checkpoint_stays(
    pool: Pool, tmp_path: Path
) -> None:
    run: dict[str, Any] = {"output": tmp_path, "checkpoint": {"every": 2}, "train__steps": 12}
    messages = pool.run(train_where_a_rank_cannot_write, 1, **run, log__report=False, ranks=2)
    folder = tmp_path / "small" / "checkpoints"
    assert len(set(messages)) == 1
    assert messages[0] == (
        f"checkpoint: rank 1 cannot write in {folder}: No space left on device; the last good checkpoint is "
        f"{folder / 'step_00000002'}"
    )
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step_00000002"]


def two_saves_of_each(names: list[str], **changes: Any) -> None:
    """Job: runs that save after their first and second step."""
    for name in names:
        trainer = Trainer(small_run(**changes, name=name))
        for _ in range(2):
            trainer.step()
            trainer.save()
        trainer.release()


def test_an_index_of_another_step_or_run_is_seen(pool: Pool, tmp_path: Path) -> None:
    """It has the same tensors, in the same files."""
    pool.run(two_saves_of_each, ["one", "other"], output=tmp_path, ranks=1)
    one, other = (tmp_path / name / "checkpoints" for name in ("one", "other"))
    saved = one / "step_00000002"
    with CheckpointReader(saved) as reader:
        tensors = reader.index["tensors"]
    for source, of in ((one / "step_00000001", "step 1"), (other / "step_00000002", "this step")):
        assert read_index(source)["tensors"] == tensors
        shutil.copy(source / "index.json", saved)
        assert next(verify.problems(saved)).startswith("index.json: damaged, its SHA-256")
        seal(saved)
        message = f"index.json: missing or damaged (of another checkpoint of {of}; checkpoint.json is of s"
        assert next(verify.problems(saved)).startswith(message)
        with pytest.raises(UserError) as caught:
            CheckpointReader(saved)
        assert message in str(caught.value)


class Panic(BaseException):
    """An exception like those of libraries in Rust."""


def save_where_the_writer_dies(**changes: Any) -> str:
    """Job: return the user's message if the writing thread ends without an error."""
    trainer = Trainer(small_run(**changes))
    trainer.step()
    try:
        with mock.patch.object(writer, "save_file", side_effect=Panic):
            trainer.save()
    except UserError as error:
        return str(error)
    finally:
        trainer.close()
    return "saved"


def test_a_writer_that_dies_has_not_saved(pool: Pool, tmp_path: Path) -> None:
    (message,) = pool.run(save_where_the_writer_dies, output=tmp_path, ranks=1)
    assert "rank 0 cannot write" in message and "writing was broken off" in message
    assert not list((tmp_path / "small" / "checkpoints").iterdir())
