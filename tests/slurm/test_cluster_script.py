"""cluster.sh tells by exit code 3 and a line that there is no Slurm, so that `.ci/run` does not fail."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.slurm.cluster import NOT_INSTALLED, SCRIPT


@pytest.mark.parametrize(
    ("command", "way_out"),
    [
        ("install", "only root can install it (apt-get install slurm-wlm munge)"),
        ("start", "cluster.sh install"),
    ],
)
def test_no_slurm(command: str, way_out: str, tmp_path: Path) -> None:
    """PATH has neither sbatch nor apt-get."""
    bash, name = shutil.which("bash"), shutil.which("id")
    assert bash is not None and name is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/id").symlink_to(name)
    arguments = [tmp_path / "cluster"] if command == "start" else []
    done = subprocess.run(
        [bash, SCRIPT, command, *arguments],
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == NOT_INSTALLED
    assert done.stderr.startswith("slurm: ") and " is not installed" in done.stderr and way_out in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "cluster").exists()
