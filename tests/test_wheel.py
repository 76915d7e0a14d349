"""The content of a built wheel; an installed package trains without the clone."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from megamoe.config import dump_yaml
from tests.support.tiny import tiny

ROOT = Path(__file__).parents[1]
LIST_FILES = """
from setuptools.dist import Distribution

distribution = Distribution({"script_name": "setup.py"})
distribution.parse_config_files()
command = distribution.get_command_obj("build_py")
command.ensure_finalized()
print(*command.get_output_mapping().values(), sep="\\n")
"""


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Its standard output; without PYTHONPATH, so that nothing is imported from the clone."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=inherited | variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files_of_the_package() -> set[str]:
    paths = (ROOT / "megamoe").rglob("*")
    return {
        str(path.relative_to(ROOT)) for path in paths if path.is_file() and path.parent.name != "__pycache__"
    }


def test_a_wheel_holds_every_file_of_the_package() -> None:
    """The sources of the compiled kernels too, which are no Python modules."""
    expected = files_of_the_package()
    assert any(name.endswith(".cpp") for name in expected) and any(name.endswith(".h") for name in expected)
    assert set(run(sys.executable, "-c", LIST_FILES, cwd=ROOT).split()) == expected


def installed(folder: Path) -> Path:
    """A fresh environment with a wheel of this clone in it: its bin folder.

    The wheel's dependencies come from the environment of the tests, whose folder a .pth file appends to the
    path. Python reads no .pth files in such a folder, so the clone's editable install there has no effect.
    """
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "megamoe", source / "megamoe", ignore=shutil.ignore_patterns("__pycache__"))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    offline = ("--no-deps", "--no-index")
    run(*pip, "wheel", *offline, "--no-build-isolation", "-w", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    shutil.rmtree(source)
    venv.create(folder / "env", symlinks=True)
    (packages,) = (folder / "env/lib").glob("python*/site-packages")
    behind = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "behind.pth").write_text("".join(f"{path}\n" for path in behind))
    python = folder / "env/bin/python"
    run(*pip, "--python", python, "install", *offline, "--ignore-installed", wheel, cwd=folder)
    return python.parent


@pytest.mark.full
def test_an_installed_wheel_trains_with_its_compiled_kernels(tmp_path: Path) -> None:
    programs, work = installed(tmp_path), tmp_path / "work"
    work.mkdir()
    where = run(programs / "python", "-c", "import megamoe; print(megamoe.__file__)", cwd=work)
    assert Path(where.strip()).is_relative_to(tmp_path / "env")
    config = tiny("output=runs", "name=a", "train.steps=2", "model.cpu_kernels=compiled")
    (work / "run.yaml").write_text(dump_yaml(config))
    output = run(programs / "megamoe", "train", "--config", "run.yaml", cwd=work)
    assert "CPU kernels" in output and " compiled" in output
    assert len((work / "runs/a/metrics.jsonl").read_text().splitlines()) == 2
    assert "2 of 2" in run(programs / "megamoe", "status", "runs/a", cwd=work)
    assert "usage: python -m megamoe " in run(programs / "python", "-m", "megamoe", "--help", cwd=work)
