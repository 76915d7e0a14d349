"""A rank's launcher may be killed before the rank has run its first line."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megamoe.parallel.launch import free_port
from megamoe.parallel.parent_death import may_have_launcher

ROOT = Path(__file__).parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="prctl and /proc are Linux's")
OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "SLURM_", "TORCHELASTIC_", "CROSS_")
BY_HAND = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
ELASTIC = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
TORCHRUN = {**BY_HAND, "GROUP_RANK": "0", **ELASTIC}
DEEPSPEED = {**BY_HAND, "CROSS_RANK": "0"}
ENTRY = [sys.executable, str(ROOT / "pretrain_gpt_moe.py"), "--config", "run.yaml"]
# Lives for a second and says so.
LIVES = """import time; from megamoe.parallel.parent_death import end_with_launcher; end_with_launcher()
time.sleep(1); open('survived', 'w').close()"""
SHORT = [sys.executable, "-c", LIVES]
# What a shell does that is the child's parent, and is then killed.
DIES_FIRST = '(sleep 0.3; exec "$@") & echo $!; kill -9 $$'
DIES_DURING_THE_IMPORTS = '"$@" & echo $!; sleep 0.7; kill -9 $$'


class Orphan:
    """A process whose parent is killed."""

    def __init__(self, folder: Path, script: str, command: list[str], variables: dict[str, str]) -> None:
        mine = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
        (folder / "run.yaml").write_text("data: {mock: true}\n")
        with (folder / "output").open("w") as output:
            self.shell = subprocess.Popen(
                ["sh", "-c", script, "sh", *command],
                cwd=folder,
                env={**mine, **variables, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        assert self.shell.stdout is not None
        self.pid = int(self.shell.stdout.readline())
        assert self.shell.wait(20) == -signal.SIGKILL

    def is_alive(self) -> bool:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "ZX"

    def lives_for(self, seconds: float) -> bool:
        """Whether it still lives after so long, if it does not end before."""
        until = time.monotonic() + seconds
        while self.is_alive() and time.monotonic() < until:
            time.sleep(0.05)
        return self.is_alive()


@pytest.fixture
def killed() -> Iterator[list[Orphan]]:
    """Whatever is left of these at the end."""
    orphans: list[Orphan] = []
    yield orphans
    for orphan in orphans:
        if orphan.is_alive():
            os.kill(orphan.pid, signal.SIGKILL)


@linux
@pytest.mark.parametrize("script", [DIES_FIRST, DIES_DURING_THE_IMPORTS], ids=["before", "imports"])
@pytest.mark.parametrize("launcher", [TORCHRUN, DEEPSPEED], ids=["torchrun", "deepspeed"])
def test_a_rank_ends_with_its_launcher_during_its_start(
    tmp_path: Path, killed: list[Orphan], script: str, launcher: dict[str, str]
) -> None:
    if launcher is DEEPSPEED and script == DIES_FIRST and may_have_launcher(_reaper()):
        pytest.skip("orphans go to a Python program here, which might be a launcher")
    variables = {**launcher, "MASTER_PORT": str(free_port())}
    killed.append(Orphan(tmp_path, script, ENTRY, variables))
    assert not killed[0].lives_for(3), (tmp_path / "output").read_text()
    assert (tmp_path / "output").read_text() == ""


def _reaper() -> int:
    """The parent of this process' orphans, which are those of its children too."""
    script = "(sleep 1; :) >/dev/null & echo $!; kill -9 $$"
    shell = subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, text=True, check=False)
    stat = Path(f"/proc/{int(shell.stdout)}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


@linux
@pytest.mark.parametrize("variables", [{}, BY_HAND], ids=["one process", "a rank by hand"])
def test_what_a_shell_has_started_outlives_it(
    tmp_path: Path, killed: list[Orphan], variables: dict[str, str]
) -> None:
    killed.append(Orphan(tmp_path, '"$@" & echo $!; sleep 0.3; kill -9 $$', SHORT, variables))
    killed[0].lives_for(20)
    assert (tmp_path / "survived").exists()


# pid: program, its parent's pid. A rank's parent is process 7.
TREES = {
    "torchrun": ({7: ("/opt/python3.11", 1), 1: ("/sbin/init", 0)}, True),
    "torchrun as process 1 of a container": ({1: ("/usr/local/bin/python", 0)}, True),
    "a script of torchrun's": ({7: ("/bin/bash", 5), 5: ("python", 1), 1: ("/sbin/init", 0)}, True),
    "init": ({1: ("/sbin/init", 0)}, False),
    "a shell as process 1 of a container": ({1: ("bash", 0)}, False),
    "systemd of a user": ({7: ("/usr/lib/systemd/systemd", 1), 1: ("/sbin/init", 0)}, False),
    "slurmstepd": ({7: ("slurmstepd: [12.0]", 1), 1: ("/sbin/init", 0)}, False),
    "hidden": ({7: ("/bin/bash", 5)}, True),
    "of another name space": ({7: ("/bin/bash", 0)}, True),
}


@pytest.mark.parametrize("case", TREES)
def test_an_orphan_is_known_by_its_ancestors(tmp_path: Path, case: str) -> None:
    tree, expected = TREES[case]
    for pid, (program, above) in tree.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes(program.encode() + b"\0-c\0python\0")
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) S 3 (b) R {above} 1 1\n")
    assert may_have_launcher(max(tree), tmp_path) is expected


def test_the_parent_in_another_name_space_may_be_a_launcher(tmp_path: Path) -> None:
    assert may_have_launcher(0, tmp_path)
