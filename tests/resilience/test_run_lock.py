"""Two launches in one folder: the second is refused until the first has ended, however it did."""

import subprocess
import sys
from pathlib import Path

import pytest

from megamoe.errors import UserError
from megamoe.resilience.processes import locked

HOLDS = """
import sys, time
from pathlib import Path
from megamoe.resilience.processes import locked
with locked(Path(sys.argv[1])):
    print("in", flush=True)
    time.sleep(60)
"""


def test_a_second_launch_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    command = [sys.executable, "-c", HOLDS, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "in\n"
        try:
            refusal = rf"folder {folder} is in use \(.*pid {other.pid}\): .*remove {tmp_path}/runs/\.a\.lock$"
            with pytest.raises(UserError, match=refusal), locked(folder):
                pass
        finally:
            other.kill()
    with locked(folder):
        assert not folder.exists()
    assert list(folder.parent.iterdir()) == []


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    refused = pytest.raises(UserError, match="output: cannot write the run folder .*/runs/a: ")
    with refused, locked(tmp_path / "runs/a"):
        pass
