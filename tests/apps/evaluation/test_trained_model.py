"""Opening checkpoints: a damaged one is passed over with a warning, and bytes are read once a session."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megamoe.apps.evaluation.trained_model import session
from megamoe.checkpoint.format import files
from megamoe.errors import UserError
from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import small_run


def damage(checkpoint: Path, how: str) -> None:
    if how == "no JSON":
        (checkpoint / "checkpoint.json").write_text("{")
    else:
        shard = checkpoint / "shard_00000.safetensors"
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)


def swept(path: Path) -> list[int] | str:
    """The steps that a sweep over three points opens, or why it opens none."""
    try:
        with session() as ranks:
            return [ranks.open(path, [f"seed={seed}"]).step for seed in (1, 2, 3)]
    except UserError as error:
        return str(error)


def opened(folder: Path) -> tuple[list[Any], list[str]]:
    """Job: what is opened of a run of three checkpoints that are damaged one after the other, and the
    checkpoints whose bytes were read.
    """
    trainer = Trainer(small_run(folder, checkpoint__keep=3))
    for _ in range(3):
        trainer.step()
        trainer.save()
    trainer.close()
    run, read, problems = folder / "small", [], files.problems

    def noted(folder: Path, share: int = 0, shares: int = 1) -> Iterator[str]:
        read.append(folder.name)
        return problems(folder, share, shares)

    found: list[Any] = []
    files.problems = noted
    try:
        for number, how in ((3, "a byte"), (2, "no JSON"), (1, "a byte")):
            damage(run / f"checkpoints/step_{number:08d}", how)
            with contextlib.redirect_stderr(io.StringIO()) as warnings:
                found.append((swept(run), warnings.getvalue().splitlines()))
        found.append(swept(run / "checkpoints/step_00000002"))
    finally:
        files.problems = problems
    return found, read


def test_a_damaged_checkpoint_is_passed_over_and_a_sweep_verifies_once(pool: Pool, tmp_path: Path) -> None:
    (((byte, json, none, named), read),) = pool.run(opened, tmp_path, ranks=1)
    first, second, third = (f"step_{number:08d}" for number in (1, 2, 3))
    assert read == [third, second, third, second, first, third, second, first, second]
    folder = tmp_path / "small/checkpoints"
    of_third = f"warning: damaged: {folder}/{third}: shard_00000.safetensors"
    of_second = f"warning: damaged: {folder}/{second}: checkpoint.json"
    assert byte[0] == [2, 2, 2] and len(byte[1]) == 1 and byte[1][0].startswith(of_third)
    assert json[0] == [1, 1, 1] and len(json[1]) == 2 and json[1][1].startswith(of_second)
    assert none[0].startswith(f"{folder}/{first}: ") and len(none[1]) == 3
    for line in (none[0], named):
        assert line.endswith("no intact checkpoint is left to go on from: name another step_* folder or run")


def opened_in(folder: Path, precisions: list[str | None]) -> list[str]:
    """Job: what becomes of a run in fp32, with experts of 12 columns, opened in each precision."""
    trainer = Trainer(small_run(folder, moe__expert_ffn_hidden_size=12))
    trainer.save()
    trainer.close()
    found = []
    for precision in precisions:
        try:
            with session(precision=precision) as ranks:
                found.append(ranks.open(folder / "small").precision)
        except UserError as error:
            found.append(str(error))
    return found


def test_the_precision_of_a_tool_is_checked_as_that_of_training(pool: Pool, tmp_path: Path) -> None:
    """On a CPU fp16 is computed in fp32."""
    ((trained, fp16, bf16),) = pool.run(opened_in, tmp_path, [None, "fp16", "bf16"], ranks=1)
    assert (trained, fp16) == ("fp32", "fp32")
    why = "moe.expert_ffn_hidden_size: 12 is not a multiple of 8, which grouped experts need in bf16"
    assert f": in bf16, {why}" in bf16 and bf16.endswith("; add --precision fp32")
