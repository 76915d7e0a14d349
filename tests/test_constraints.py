"""The documented installation: every extra resolves under the versions of constraints/."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILT_WITH_CUDA = {"gpu"}  # its package is compiled on the machine with the GPU
NO_NETWORK = ("Failed to establish a new connection", "Temporary failure in name resolution")


def interpreter_of(version: str) -> str:
    """The path of an interpreter of this version: the tests' own, one on the PATH, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable, shutil.which(f"python{version}"), *pyenv.glob(f"{version}*/bin/python")]
    for candidate in filter(None, candidates):
        command = [str(candidate), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(command, capture_output=True, text=True).stdout.strip() == version:
            return str(candidate)
    pytest.skip(f"there is no Python {version} on the PATH or in {pyenv}")


@pytest.mark.full
@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_every_extra_resolves(version: str, tmp_path: Path) -> None:
    """In one resolution: versions that fit all extras together fit each of them."""
    (tmp_path / "megamoe").mkdir()  # the package's metadata need no other module
    for name in ("pyproject.toml", "README.md", "LICENSE", "megamoe/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = ",".join(sorted(project["optional-dependencies"].keys() - BUILT_WITH_CUDA))
    command = [sys.executable, "-m", "pip", "--python", interpreter_of(version), "install", "--quiet"]
    command += ["--dry-run", "--ignore-installed", "-c", f"{ROOT}/constraints/python{version}.txt"]
    done = subprocess.run(
        [*command, f"{tmp_path}[{extras}]"], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    if any(message in done.stderr for message in NO_NETWORK):
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
