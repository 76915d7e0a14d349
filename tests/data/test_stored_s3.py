"""Training on data in a real S3 server on this machine: equal to the disk, also with faults on the way."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("s3fs", reason="the extra `s3` is not installed")
pytest.importorskip("moto.server", reason="the S3 server of moto[server] is not installed")

from megamoe.apps.prepare import write
from megamoe.data import blocks, stored
from megamoe.data.block_cache import BlockCache
from megamoe.data.byte_files import open_bytes
from megamoe.data.card import DataFiles
from megamoe.data.stored import local_copy
from megamoe.errors import ExitCode, UserError
from megamoe.train.loop import train
from tests.support.checkpoint_files import assert_same_bits, read_tensors
from tests.support.data.sources import make_data
from tests.support.fakes.s3 import BUCKET, Faults, s3_server
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import ds_config, small_run
from tests.support.tiny import restored_process, tiny

pytestmark = pytest.mark.full
URL = f"s3://{BUCKET}/folder/corpus"
TEXTS = ["".join(chr(97 + (i * j) % 26) for j in range(3 + 7 * i % 50)) for i in range(200)]


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    for module in (blocks, stored):
        monkeypatch.setattr(module, "WAITS_S", (0.1,) * 6)
    with s3_server(monkeypatch) as found:
        yield found


@pytest.fixture
def corpus(tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the prefix on the disk of a dataset of about 90 blocks, which is uploaded as well."""
    import s3fs

    monkeypatch.setattr(write, "BLOCK_BYTES", 128)
    prefix = make_data(tmp_path / "corpus", TEXTS)
    system = s3fs.S3FileSystem(skip_instance_cache=True)
    for path in tmp_path.glob("corpus.*"):
        if path.is_file():
            system.put_file(str(path), f"{BUCKET}/folder/{path.name}")
    return prefix


def run(output: Path, source: str, *overrides: str) -> list[Any]:
    own = ["data.mock=false", "model.vocab_size=null", "evaluation.batches=1", "train.steps=6", "name=a"]
    own += ["checkpoint={every: 3, keep: 2}", "data.split=[0.8, 0.2, 0]", f"data.sources=['{source}']"]
    own += [f"output={output}", f"data.remote_cache={output / 'cache'}"]
    with restored_process():
        assert train(tiny(*own, *overrides)) == ExitCode.FINISHED
    lines = (output / "a/metrics.jsonl").read_text().splitlines()
    return [(row["train/loss"], row.get("val/lm_loss")) for row in map(json.loads, lines)]


@pytest.mark.parametrize(
    ("kind", "share", "workers"), [("", 0.0, 2), ("slow", 0.2, 1), ("busy", 0.05, 0), ("cut", 0.05, 1)]
)
def test_a_run_is_that_of_the_disk(
    tmp_path: Path, faults: Faults, corpus: str, kind: str, share: float, workers: int
) -> None:
    """Losses and the last checkpoint, Python's random state included, after a resume with an empty cache."""
    expected = run(tmp_path / "disk", corpus)
    faults.kind, faults.share = kind, share
    run(tmp_path / "there", URL, "train.exit_after_steps=3", f"data.workers={workers}")
    new = f"data.remote_cache={tmp_path / 'new'}"
    assert run(tmp_path / "there", URL, new, "checkpoint.resume=auto", f"data.workers={workers}") == expected
    last = "a/checkpoints/step_00000006"
    assert_same_bits(read_tensors(tmp_path / "there" / last), read_tensors(tmp_path / "disk" / last))
    states = [sorted((tmp_path / name / last).glob("*random*")) for name in ("there", "disk")]
    assert [path.read_bytes() for path in states[0]] == [path.read_bytes() for path in states[1]]
    assert bool(faults.failed) == bool(kind)
    written = (tmp_path / "there/a/config.yaml").read_text()
    assert URL in written and "testing" not in written


def _train(settings: dict[str, str], output: Path, source: str, steps: int) -> None:
    """Job: a run on ranks that were started before the server."""
    os.environ.update(settings)
    train(
        small_run(
            output,
            train__steps=steps,
            parallel__deepspeed=ds_config("zero1_fp32"),
            train__global_batch_size=4,
            data={
                "sources": [{"path": source}],
                "sequence_length": 16,
                "split": [1, 0, 0],
                "remote_cache": str(output.parent / "cache"),
            },
            model__vocab_size=None,
            evaluation__batches=0,
            log={"report": False},
        )
    )


def test_ranks_and_their_loaders_share_cache(pool: Pool, tmp_path: Path, faults: Faults, corpus: str) -> None:
    settings = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    faults.kind, faults.share = "busy", 0.05
    for name, source in (("disk", corpus), ("there", URL)):
        pool.run(_train, settings, tmp_path / name, source, 3, ranks=2, timeout_s=500)
    last = Path("small", "checkpoints", "step_00000003")
    assert_same_bits(read_tensors(tmp_path / "there" / last), read_tensors(tmp_path / "disk" / last))


def test_faults_that_stay_are_one_line(tmp_path: Path, faults: Faults, corpus: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(blocks.StoredBytes, "_fill", lambda self: None)
    cache, content = tmp_path / "cache", Path(corpus + ".bin").read_bytes()
    BlockCache(cache).limit(10**9)
    file = open_bytes(DataFiles(local_copy(URL, cache)).bin)
    random.seed(3)
    before = random.getstate()
    faults.kind, faults.share = "cut", 0.2
    assert file.read(0, 1000) == content[:1000]
    assert random.getstate() == before
    faults.kind, faults.share = "cut", 1.0
    with pytest.raises(UserError, match=r"data 's3://.*corpus\.bin' cannot be reached: ") as error:
        file.read(2000, 1)
    assert "\n" not in str(error.value) and "testing" not in str(error.value)
    faults.kind = ""
    import s3fs

    damaged = bytearray(content)
    damaged[2001] ^= 1
    s3fs.S3FileSystem(skip_instance_cache=True).pipe_file(f"{BUCKET}/folder/corpus.bin", bytes(damaged))
    with pytest.raises(UserError, match=r"is damaged or was replaced: bytes 1920 to 2047 have SHA-256"):
        file.read(2000, 9)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UserError, match="data 's3://.*: credentials are missing or refused"):
        local_copy(URL, tmp_path / "other")
