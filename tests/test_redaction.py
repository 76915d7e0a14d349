"""Secrets of the environment and of arguments stay out of logs, of the run's folder and of W&B's files."""

import json
import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import wandb

from megamoe import object_storage, redaction
from megamoe.apps.cluster.status import as_text, read_status
from megamoe.checkpoint.remote import RemoteFolder, fetch_newest
from megamoe.checkpoint.uploads import Uploads
from megamoe.config.schema import WandbConfig
from megamoe.data.remote import told
from megamoe.errors import ExitCode, UserError, printable
from megamoe.metrics.sinks.wandb_sink import WandbSink
from megamoe.object_storage import RemoteError, has_credentials, without_credentials
from megamoe.redaction import is_secret, redact, redacted, without_secrets
from megamoe.resilience.error_reporting import hide_secrets, report_error
from megamoe.resilience.run_status import RunStatus
from megamoe.validation.run import credential_problems

ROOT = Path(__file__).parents[1]
ARGUMENTS = (
    ("train.steps=5", "train.steps=5"),
    ("data.tokenizer=bytes", "data.tokenizer=bytes"),
    ("plugin.api_key=abc", "plugin.api_key=***"),
    ("s3.secret=abc", "s3.secret=***"),
    ("--auth-token abc", "--auth-token ***"),
    ("output=s3://me:abc@host/x", "output=s3://***@host/x"),
    ("note=hf_abcdefghijklmnop", "note=***"),
)
HIDDEN = ("MEGAMOE_TOKEN", "NCCL_SECRET", "TORCH_PASSWORD", "MASTER_KEY", "CUDA_UNKNOWN")
SECRETS = dict.fromkeys(HIDDEN, "hidden")
SECRETS |= {"SLURM_JWT": "eyJ_hidden", "MEGAMOE_HOME": "https://me:hidden@host"}


@pytest.mark.parametrize(("given", "expected"), ARGUMENTS)
def test_arguments_lose_their_secrets(given: str, expected: str) -> None:
    assert " ".join(redacted(given.split())) == expected


def test_words_that_contain_a_word_are_no_secrets() -> None:
    assert not any(map(is_secret, ("data.tokenizer", "MONKEY", "num_tokens", "authors", "keyboard")))
    assert all(map(is_secret, ("WANDB_API_KEY", "SLURM_JWT", "NCCL_SECRET", "db-password", "a.token")))


def test_what_starts_meanwhile_sees_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "s3.secret=abc"])
    for name in ("SLURM_JWT", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "hidden")
    with without_secrets(kept=("WANDB_",)):
        assert "SLURM_JWT" not in os.environ and os.environ["WANDB_API_KEY"] == "hidden"
        assert sys.argv == ["train", "s3.secret=***"]
    assert os.environ["SLURM_JWT"] == "hidden" and sys.argv == ["train", "s3.secret=abc"]


def test_the_description_of_a_slurm_job_has_no_secret_and_one_reader(tmp_path: Path) -> None:
    """`open_logs` of the sbatch files, without Slurm."""
    arguments = " ".join(given for given, _ in ARGUMENTS)
    script = f"""
    set -euo pipefail
    source '{ROOT}/examples/slurm/common.sh'
    open_logs {arguments}
    cat "$MEGAMOE_ENVIRONMENT"
    stat -c %a "$MEGAMOE_ENVIRONMENT"
    """
    python = tmp_path / "python"  # common.sh splits MEGAMOE_PYTHON at spaces, which this one's path may have
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n")
    python.chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3"}
    found = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, **job, **SECRETS, "MEGAMOE_PYTHON": str(python)},
        text=True,
        capture_output=True,
        check=True,
    ).stdout
    lines = found.splitlines()
    assert "hidden" not in found and "abc" not in found
    assert lines[1] == "arguments: " + " ".join(expected for _, expected in ARGUMENTS)
    assert {"NCCL_DEBUG=INFO", "OMP_NUM_THREADS=3", "SLURM_JOB_ID=7"} < set(lines)
    assert lines[-1] == "600"


# What a store answers repeats the token of the environment, and other secrets by their form.
TOKEN = "a+session/token=="
PARTS = {TOKEN, "IOSFODNN7EXAMPLE", "fe5f80f77d5f", "abcdef1234567890", "bPxRfiCY", "hunter2", "a%2Bsession"}
ANSWER = (
    f"An error occurred (ExpiredToken): <Token-0>x{TOKEN}</Token-0> <AWSAccessKeyId>AKIAIOSFODNN7EXAMPLE</>\n"
    "GET https://h/k?X-Amz-Signature=fe5f80f77d5f&token=a%2Bsession%2Ftoken%3D%3D, Bearer abcdef1234567890, "
    "'aws_secret_access_key': 'K7MDENG/bPxRfiCY', s3://me:hunter2@bucket/x"
)


def assert_clean(text: str) -> None:
    assert "ExpiredToken" in text and not [part for part in PARTS if part in text], text


@pytest.mark.parametrize(
    "text",
    [
        "optimizer.lr: found x, expected a number; see https://host/page#part",
        "data 's3://bucket/da?a/*.bin' holds no files",
        "end-of-document token: found 50256, expected 7; train.objective.special_token=<|endoftext|>",
        "override 'data.tokenizer=/a/long/path/of/a/tokenizer.json': expected section.key=value",
        "give them by the environment (for s3:// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)",
    ],
)
def test_ordinary_messages_stay(text: str) -> None:
    assert redact(text) == text == str(UserError(text))


def leaks(*unused: object, **also_unused: object) -> Any:
    raise OSError(ANSWER)


class Leaky:
    """A file system whose every answer is an error that repeats secrets."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return leaks


def test_no_sink_gets_what_a_store_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    monkeypatch.setattr(object_storage, "WAITS_S", (0.0,))
    for module in (sys, threading):
        monkeypatch.setattr(module, "excepthook", module.excepthook)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    last_resort = logging.StreamHandler(sys.stderr)
    monkeypatch.setattr(logging, "lastResort", last_resort)
    folder, lines = RemoteFolder("memory://bucket", "run"), list[str]()
    folder._fs = Leaky()
    # Checkpoints and data: an error, a line of the run, what the summary keeps.
    for action in (lambda: fetch_newest(folder, tmp_path / "run", lines.append), leaks_in_told):
        with pytest.raises(UserError) as raised:
            action()
        assert_clean(str(raised.value))
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/SHA256SUMS").write_text(f"{'0' * 64}  checkpoint.json\n")
    uploads = Uploads(folder, tmp_path, 1, lines.append)
    uploads.add(tmp_path / "checkpoint")
    lines.append(uploads.close() or "")
    # Errors that are made of others: of ranks, of problems, of a file.
    lines += [str(UserError(ANSWER)), str(RemoteError(ANSWER)), printable(ANSWER)]
    # The process' own: a traceback, the hooks, loggers without a handler.
    assert report_error(RuntimeError(ANSWER)) == ExitCode.UNEXPECTED
    hide_secrets()
    error = ValueError(ANSWER)
    sys.excepthook(ValueError, error, None)
    threading.excepthook(threading.ExceptHookArgs((ValueError, error, None, None)))
    last_resort.handle(logging.LogRecord("botocore", logging.ERROR, "", 0, ANSWER, None, None))
    sys.stderr.write(warnings.formatwarning(UserWarning(ANSWER), UserWarning, "s3fs.py", 1, ANSWER))
    printed = capsys.readouterr().err
    assert printed.count("ExpiredToken") == 6 and len(lines) == 5
    lines.append(printed)
    # The files of a run, and those of a version that wrote them as they were.
    for rank in (0, 1):
        with pytest.raises(RuntimeError), RunStatus(tmp_path, rank, 2, lambda: 1, 9):
            raise RuntimeError(ANSWER)
    lines += [(tmp_path / name).read_text() for name in ("heartbeat.json", "failures/rank_00001.json")]
    (tmp_path / "heartbeat.json").write_text(json.dumps({"state": "failed", "reason": ANSWER}))
    lines.append(as_text(read_status(tmp_path)))
    last_resort.setFormatter(None)
    monkeypatch.setattr(wandb, "init", leaks)
    WandbSink(tmp_path, WandbConfig(mode="offline"), "run", {}, None)
    for line in [*lines, capsys.readouterr().err]:
        assert_clean(line)


@pytest.mark.parametrize("variable", ["AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"])
def test_the_keys_in_files_of_aws_are_known(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / ".aws"
    home.mkdir()
    monkeypatch.setattr(redaction, "_known", {})
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(variable, raising=False)
    usual = home / ("credentials" if "SHARED" in variable else "config")
    text = "[a]\naws_secret_access_key = {0}/one\n[b]\n aws_session_token={0}/two\nsource = Environment"
    said = "denied: {0}/one and {0}/two, Environment"
    for path, secret in ((usual, "wJalrXUtn"), (usual, "rotated12"), (tmp_path / "other", "elsewhere")):
        assert "***" not in redact(said.format(secret))
        path.write_text(text.format(secret) * (1 + (secret == "rotated12")))
        if path != usual:
            monkeypatch.setenv(variable, str(path))
        assert redact(said.format(secret)) == "denied: *** and ***, Environment"
    os.mkfifo(tmp_path / "pipe")  # its reader would wait
    for bad in ("none", ".aws", "pipe", "nul\0", "a" * 300):
        monkeypatch.setitem(redaction.AWS_FILES, variable, str(tmp_path / bad))
        monkeypatch.delenv(variable, raising=False)
        assert redact("text") == "text"


def leaks_in_told() -> None:
    with told("s3://bucket/x"):
        leaks()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/runs", None),
        ("hf://datasets/a/b/*.parquet", None),
        ("s3://bucket/year=202?/*", None),
        ("data/sig=1", None),
        ("s3://me:pass@bucket/x", "s3://***@bucket/x"),
        ("s3://me:p@ss@bucket/x", "s3://***@bucket/x"),
        ("az://box/x?sv=2024&sig=hidden", "az://box/x"),
        ("https://host/x?token=hidden", "https://host/x"),
        ("https://host/x?X-Amz-Date=1&X-Amz-Signature=hidden", "https://host/x"),
        ("https://host/x?X-Goog-Signature=hidden", "https://host/x"),
        ("https://host/x?AWSAccessKeyId=hidden&Expires=1", "https://host/x"),
        ("https://host/x?api_key=hidden", "https://host/x"),
    ],
)
def test_a_run_is_refused_for_a_url_with_credentials_at_any_key(url: str, shown: str | None) -> None:
    """So that no record has it: the saved configuration, checkpoints, W&B, the report, data cards."""
    problems = list(
        credential_problems({"checkpoint": {"remote": url}, "data": {"sources": [{"path": url}]}})
    )
    assert has_credentials(url) == bool(problems) == (shown is not None)
    if shown:
        assert [problem.key for problem in problems] == ["checkpoint.remote", "data.sources[0].path"]
        assert f"found {shown} with credentials" in problems[0].message
        assert without_credentials(url) == shown
