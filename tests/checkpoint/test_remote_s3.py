"""Checkpoints in a real S3 server on this machine: faults on the way, and runs that are killed and wiped."""

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("s3fs", reason="the extra `s3` is not installed")
pytest.importorskip("moto.server", reason="the S3 server of moto[server] is not installed")

from megamoe import object_storage
from megamoe.checkpoint.remote import RemoteFolder
from megamoe.errors import ExitCode, UserError
from megamoe.train.loop import train
from tests.distributed.faults.test_kills import RUN as KILLED_RUN
from tests.distributed.faults.test_kills import train_to_the_end
from tests.support.checkpoint_files import assert_same_bits, read_tensors
from tests.support.fakes.s3 import BUCKET, Faults, s3_server
from tests.support.ranks.pool import Pool, RankError
from tests.support.tiny import restored_process, tiny

pytestmark = pytest.mark.full
URL = f"s3://{BUCKET}/some/where"
RUN = ("name=a", "checkpoint={every: 2, keep: 2}", "evaluation.batches=0")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    monkeypatch.setattr(object_storage, "WAITS_S", (0.1, 0.1, 0.1, 0.1))
    with s3_server(monkeypatch) as found:
        yield found


def run(output: Path, *overrides: str) -> list[dict[str, Any]]:
    with restored_process():
        config = tiny(f"output={output}", *RUN, f"checkpoint.remote={URL}", *overrides)
        assert train(config) == ExitCode.FINISHED
    return [json.loads(line) for line in (output / "a/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("kind", "share"), [("", 0.0), ("slow", 0.5), ("busy", 0.2), ("cut", 0.2)])
def test_a_run_goes_on_on_an_empty_machine(tmp_path: Path, faults: Faults, kind: str, share: float) -> None:
    whole = run(tmp_path / "whole", "name=a", "train.steps=6", "checkpoint.remote=null")
    faults.kind, faults.share = kind, share
    run(tmp_path / "first", "train.steps=6", "train.exit_after_steps=4")
    shutil.rmtree(tmp_path / "first")
    rows = run(tmp_path / "second", "train.steps=6", "checkpoint.resume=auto")
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in whole]
    last = "a/checkpoints/step_00000006"
    assert_same_bits(read_tensors(tmp_path / "second" / last), read_tensors(tmp_path / "whole" / last))
    assert bool(faults.failed) == bool(kind)


def test_a_full_bucket_is_one_line_and_checkpoints_stay(tmp_path: Path, faults: Faults, capfd: Any) -> None:
    run(tmp_path / "first", "train.steps=2")
    faults.kind, faults.share = "full", 1.0
    with pytest.raises(UserError, match="checkpoint.remote: .* does not answer as expected"):
        run(tmp_path / "first", "train.steps=4", "checkpoint.resume=auto")
    faults.share = 0.0
    put = RemoteFolder.put

    def fills(self: RemoteFolder, local: Path, *names: str) -> None:
        faults.share = 1.0
        put(self, local, *names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteFolder, "put", fills)
        with pytest.raises(UserError, match="step_00000004 is not in s3://"):
            run(tmp_path / "first", "train.steps=4", "checkpoint.resume=auto")
    assert (tmp_path / "first/a/checkpoints/step_00000004/SHA256SUMS").is_file()
    told = capfd.readouterr()
    assert "testing-secret" not in told.out + told.err
    faults.share = 0.0  # with space again, a resume uploads what is missing
    run(tmp_path / "first", "train.steps=4", "checkpoint.resume=auto")
    assert RemoteFolder(URL, "a").read_name("latest").startswith("step_00000004-")
    config = (tmp_path / "first/a/config.yaml").read_text()
    assert URL in config and "testing" not in config


def test_missing_credentials_are_one_line(tmp_path: Path, faults: Faults, monkeypatch: Any) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UserError, match="checkpoint.remote: .*credentials") as error:
        run(tmp_path / "first")
    assert "\n" not in str(error.value)


def test_a_killed_and_wiped_run_ends_as_one_that_is_not(pool: Pool, tmp_path: Path, faults: Faults) -> None:
    """Twenty kills, after each of which the disk is empty; one request in 20 fails."""
    steps, kills, generator, killed = 120, 20, random.Random(7), 0
    settings = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    pool.run(with_environment, settings, tmp_path / "whole", steps, None, ranks=2)
    RemoteFolder(URL, "small").delete_all()
    faults.kind, faults.share = "busy", 0.05
    output = tmp_path / "killed"
    for _ in range(kills):
        death = (generator.randrange(2), generator.uniform(0, 1.5), None, 0, False)
        try:
            pool.run(with_environment, settings, output, steps, death, ranks=2)
        except RankError as error:
            assert "exit code -9" in str(error), error
            killed += 1
        shutil.rmtree(output)
    pool.run(with_environment, settings, output, steps, None, ranks=2)
    assert killed >= 0.6 * kills
    last = Path("small", "checkpoints", f"step_{steps:08d}")
    assert_same_bits(read_tensors(output / last), read_tensors(tmp_path / "whole" / last))


def with_environment(settings: dict[str, str], output: Path, steps: int, plan: Any) -> None:
    """Job: `train_to_the_end` in ranks that were started before the server."""
    os.environ.update(settings)
    remote = {"every": 4, "resume": "auto", "remote": URL}
    train_to_the_end(output, {**KILLED_RUN, "checkpoint": remote}, steps, plan)
