"""The file of a W&B sweep, and the run that an agent of it starts."""

import subprocess
from pathlib import Path

import pytest
import yaml

from megamoe.config import load_config
from megamoe.metrics.sinks.summaries import summary_of
from megamoe.metrics.sinks.wandb_sink import ID_FILE, _run_id
from tests.metrics.test_summaries import step_of
from tests.support.tiny import ROOT


def test_the_sweep_starts_valid_runs_in_folders_of_their_own(tmp_path: Path) -> None:
    """Its command with W&B's macros filled in as an agent does; `python` prints its arguments."""
    sweep = yaml.safe_load((ROOT / "examples/wandb/sweep.yaml").read_text())
    last = {name: options["values"][-1] for name, options in sweep["parameters"].items()}
    macros = {
        "${env}": ["/usr/bin/env"],
        "${args_no_hyphens}": [f"{name}={value}" for name, value in last.items()],
    }
    command = [word for part in sweep["command"] for word in macros.get(part, [part])]
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "WANDB_RUN_ID": "abc123"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=ROOT)
    script, flag, config_file, *overrides = done.stdout.split()
    assert (script, flag) == ("pretrain_gpt_moe.py", "--config")
    config = load_config(ROOT / config_file, overrides)
    assert (config.name, config.seed, config.optimizer.lr) == ("sweep-abc123", 2, 1e-3)
    assert config.moe.losses["switch_balance"].options.weight == 0.01 and config.log.wandb.enabled
    assert sweep["metric"]["name"] in summary_of(step_of(2, 8)).scalars


def test_a_run_of_sweep_has_id_that_its_agent_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "chosen")
    assert _run_id(tmp_path / ID_FILE, resumed=False) != "chosen", "a stray variable must not join runs"
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    assert _run_id(tmp_path / ID_FILE, resumed=False) == "chosen" == (tmp_path / ID_FILE).read_text().strip()
