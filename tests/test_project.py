"""The files of a public project agree with the code: versions, workflow, hooks, templates, release script."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

import megamoe

ROOT = Path(__file__).parents[1]


def test_versions_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert citation["version"] == megamoe.__version__ and citation["license"] == "Apache-2.0"
    assert f"\n## {megamoe.__version__} (" in changes or "\n## Unreleased\n" in changes


def test_the_workflow_and_the_hooks_call_what_is_there() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert steps == [".ci/run", "make setup", ".ci/release --check", "make docs"]
    makefile = (ROOT / "Makefile").read_text()
    assert 'git clone --quiet . "$scratch/a clone/megamoe"' in (ROOT / ".ci/run").read_text(encoding="utf-8")
    for script in (".ci/run", ".ci/release"):
        assert (ROOT / script).stat().st_mode & 0o111, f"{script} cannot be executed"
        for target in re.findall(
            r"^(?:exec |  )?make ([\w-]+)", (ROOT / script).read_text(), flags=re.MULTILINE
        ):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"{script}: make {target}"
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12"]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    named = {word for hook in hooks for word in hook["entry"].split() if word.startswith("tests/")}
    assert named and all((ROOT / name).exists() for name in named)


@pytest.mark.parametrize("name", ["bug.yml", "method.yml", "config.yml"])
def test_the_templates_of_issues_are_yaml(name: str) -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE" / name).read_text())
    assert "blank_issues_enabled" in form or all("type" in each for each in form["body"])


def release(*arguments: str) -> subprocess.CompletedProcess[str]:
    if not (ROOT / ".venv/bin/python").exists():
        pytest.skip("no .venv here")
    return subprocess.run([".ci/release", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "error: expected --check or a version, such as 0.2.0"),
        (("next",), "error: next: expected a version, such as 0.2.0"),
        (("99.0.0",), f"error: megamoe.__version__ is {megamoe.__version__}, not 99.0.0"),
    ],
)
def test_a_mistake_before_a_release_is_one_line(arguments: tuple[str, ...], told: str) -> None:
    done = release(*arguments)
    assert (done.returncode, done.stderr.strip(), done.stdout) == (2, told, "")


@pytest.mark.full
def test_the_wheel_of_a_release_starts() -> None:
    done = release("--check")
    assert done.returncode == 0, done.stderr
    assert f"megamoe-{megamoe.__version__}-py3-none-any.whl" in done.stdout
