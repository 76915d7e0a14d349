"""The W&B workspace as code: its golden specification, its charts' names, the tool, and the sweep's file."""

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from megamoe.apps.report import dashboard_command as wandb_dashboard
from megamoe.apps.report.dashboard import SECTIONS, Dashboard, spec_of
from megamoe.config import load_config
from megamoe.metrics.sinks.summaries import Summaries
from megamoe.metrics.sinks.wandb_sink import ID_FILE, _run_id
from tests.metrics.test_summaries import step_of

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).with_name("wandb_dashboard.json")
OPTIONS = ["--project", "p", "--entity", "e", "--group-by", "layout,seed", "--compare", "one,two"]


@pytest.fixture
def package() -> None:
    pytest.importorskip("wandb_workspaces")


def test_without_a_login_the_golden_specification_is_written(
    package: None, nobody_is_logged_in: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To write it anew: the tool with OPTIONS, --dry-run and --output."""
    path = tmp_path / "spec.json"
    assert wandb_dashboard.main([*OPTIONS, "--output", str(path)]) == 0
    assert json.loads(path.read_text()) == json.loads(GOLDEN.read_text())
    output = capsys.readouterr().out
    assert "nobody is logged in" in output and "workspace and report" in output and str(path) in output


def test_with_a_login_both_are_saved(
    package: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved: list[str] = []

    def made(name: str) -> SimpleNamespace:
        return SimpleNamespace(save=lambda: saved.append(name), url=f"https://wandb.example/{name}")

    monkeypatch.setenv("WANDB_API_KEY", "made-up")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Dashboard, "workspace", lambda self: made("workspace"))
    monkeypatch.setattr(Dashboard, "report", lambda self, runs: made(f"report of {len(runs)}"))
    assert wandb_dashboard.main(OPTIONS) == 0
    assert saved == ["workspace", "report of 2"] and list(tmp_path.iterdir()) == []
    assert "https://wandb.example/workspace" in capsys.readouterr().out


def test_every_chart_shows_what_a_run_sends() -> None:
    sent = Summaries(100).of(step_of(12, 8)).scalars
    for name, charts in SECTIONS.items():
        for chart in charts:
            if chart.pattern is None:
                assert set(chart.keys) <= set(sent), name
            else:
                assert any(re.search(chart.pattern, key) for key in sent), chart.title


def test_a_workspace_has_six_sections_with_names_and_units(package: None) -> None:
    spec = spec_of(Dashboard("p", "e", ["study"]).workspace())
    assert [section["name"] for section in spec["sections"]] == [
        "loss", "load", "routing", "speed", "health", "evaluation"
    ]  # fmt: skip
    for section in spec["sections"]:
        for panel in section["panels"]:
            assert "media_keys" in panel or (panel["title_x"] == "step" and panel["title_y"].endswith("]"))
    assert spec["runset_settings"]["groupby"] == [{"name": "study"}]


BAD = {
    "a group that is none": (["--group-by", "colour"], "--group-by: 'colour' is none of study, layout, seed"),
    "one run to compare": (["--compare", "one"], "--compare: 'one' names 1 run; name at least two"),
    "a folder that is missing": (
        ["--output", "missing/spec.json"],
        "--output: missing/spec.json: No such file",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(
    package: None,
    nobody_is_logged_in: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    case: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    options, message = BAD[case]
    assert wandb_dashboard.main(options) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


def test_a_missing_package_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb_workspaces.workspaces", None)
    monkeypatch.setitem(__import__("sys").modules, "wandb_workspaces.reports.v2", None)
    assert wandb_dashboard.main([]) == 2
    assert "pip install 'megamoe[wandb]'" in capsys.readouterr().err


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
    assert sweep["metric"]["name"] in Summaries(0).of(step_of(2, 8)).scalars


def test_a_run_of_a_sweep_has_the_id_that_its_agent_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "chosen")
    assert _run_id(tmp_path / ID_FILE, resumed=False) != "chosen", "a stray variable must not join runs"
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    assert _run_id(tmp_path / ID_FILE, resumed=False) == "chosen" == (tmp_path / ID_FILE).read_text().strip()
