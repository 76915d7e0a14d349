"""Secrets of the environment and of arguments stay out of logs, of the run's folder and of W&B's files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megamoe.redaction import is_secret, redacted, without_secrets

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
SECRETS = {
    "SLURM_JWT": "eyJ_hidden",
    "MEGAMOE_TOKEN": "hidden",
    "NCCL_SECRET": "hidden",
    "TORCH_PASSWORD": "hidden",
    "MASTER_KEY": "hidden",
    "CUDA_UNKNOWN": "hidden",
    "MEGAMOE_HOME": "https://me:hidden@host",
}


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
    source {ROOT}/examples/slurm/common.sh
    open_logs {arguments}
    cat "$MEGAMOE_ENVIRONMENT"
    stat -c %a "$MEGAMOE_ENVIRONMENT"
    """
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3"}
    found = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, **job, **SECRETS, "MEGAMOE_PYTHON": sys.executable},
        text=True,
        capture_output=True,
        check=True,
    ).stdout
    lines = found.splitlines()
    assert "hidden" not in found and "abc" not in found
    assert lines[1] == "arguments: " + " ".join(expected for _, expected in ARGUMENTS)
    assert {"NCCL_DEBUG=INFO", "OMP_NUM_THREADS=3", "SLURM_JOB_ID=7"} < set(lines)
    assert lines[-1] == "600"
