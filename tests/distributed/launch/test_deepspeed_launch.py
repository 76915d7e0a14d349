"""tools/deepspeed_launch.py: a wrong hostfile, and ssh or pdsh missing, are a line before anything starts."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.apps.cluster import launch_command
from megamoe.parallel.launch import free_port
from tests.distributed.launch.test_launch import RUN, assert_trained, environment_of, finish, start
from tests.support.ranks.runs import ROOT
from tests.support.tiny import one_line

TOOL = str(ROOT / "tools/deepspeed_launch.py")
# pdsh starts a command on each machine, with %n as its number; here both machines are this one.
PDSH = """#!/bin/bash
while [ "$1" != -w ]; do shift; done
[ "$2" = node1,node2 ] || exit 9
shift 2
for node in 0 1; do bash -c "${*//%n/$node}" & done
wait -n && wait -n
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, with a run and `bin`, in which programs are found before the system's."""
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path


def program(folder: Path, name: str, text: str) -> None:
    (folder / "bin" / name).write_text(text)
    (folder / "bin" / name).chmod(0o755)


def main(*arguments: str) -> Any:
    return launch_command.main([*arguments, "--master_addr", "127.0.0.1", "pretrain_gpt_moe.py"])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("node1\n", "hostfile:1: found 'node1', expected 'NAME slots=N' with N above 0"),
        ("# two\n\nnode1 slots=8\nnode2 slot=8\n", "hostfile:4: found 'node2 slot=8', expected"),
        ("node1 slots=0\n", "hostfile:1: found 'node1 slots=0', expected"),
        ("node1 slots=99999999999999\n", "hostfile:1: found 'node1 slots=99999999999999', expected"),
        ("node1 slots=8 node2 slots=8\n", "hostfile:1: found 'node1 slots=8 node2 slots=8', expected"),
        ("node1 slots=8\nnode1 slots=8\n", "hostfile:2: node1 is there twice; give each machine one line"),
        ("# nothing\n", "hostfile: no machine; expected lines such as 'node1 slots=8'"),
        ("\0\n", "hostfile:1: found '\\x00', expected"),
        (b"\xff\xfe", "--hostfile hostfile: 'utf-8' codec can't decode byte 0xff"),
        (None, "--hostfile hostfile: No such file or directory; name a file"),
    ],
)
def test_a_wrong_hostfile(
    text: str | bytes | None, line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (folder / "hostfile").write_bytes(text.encode() if isinstance(text, str) else text)
    assert line in one_line(main("--hostfile", "hostfile"), capsys)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((), "no answer by ssh without a password from node2.invalid: try `ssh node2.invalid hostname`"),
        (("--include", "node3"), "deepspeed: Hostname 'node3' not found in hostfile"),
        (("--num_nodes", "1", "--include", "node1"), "deepspeed: Cannot specify num_nodes/gpus with include"),
    ],
)
def test_machines_that_are_not_there(
    options: tuple[str, ...], line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed tries only the first machine by ssh."""
    program(folder, "ssh", '#!/bin/sh\ncase "$*" in *invalid*) exit 255 ;; esac\n')
    program(folder, "pdsh", "#!/bin/sh\nexit 1\n")
    (folder / "hostfile").write_text("node1 slots=2\nnode2.invalid slots=2\n")
    assert line in one_line(main("--hostfile", "hostfile", *options), capsys)


@pytest.mark.parametrize(
    ("options", "programs", "missing"),
    [((), (), "ssh"), (("--no_ssh_check",), (), "ssh"), ((), ("ssh",), "pdsh")],
)
def test_ssh_or_pdsh_is_missing(
    options: tuple[str, ...],
    programs: tuple[str, ...],
    missing: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in programs:
        program(folder, name, "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(folder / "bin"))
    (folder / "hostfile").write_text("node1 slots=2\nnode2 slots=2\n")
    line = one_line(main("--hostfile", "hostfile", *options), capsys)
    assert line.startswith(f"error: {missing} is not installed here, and deepspeed needs it: install it, or")


HIDES_DEVICES = pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="this launcher shows its ranks the devices again"
)


def trains(folder: Path, *options: str) -> None:
    """Train on two ranks that share the experts."""
    command = [sys.executable, TOOL, "--hostfile", "hostfile", *options, "--master_addr", "127.0.0.1"]
    command += ["--master_port", str(free_port()), str(ROOT / "pretrain_gpt_moe.py"), "--config", "run.yaml"]
    environment = environment_of(DS_ACCELERATOR="cpu")
    code, output = finish(start([*command, f"output={folder}", "parallel.expert=2"], environment, folder))
    assert code == 0, output
    assert_trained(folder, ranks=2)


@pytest.mark.full
@HIDES_DEVICES
def test_two_local_ranks_of_a_hostfile(folder: Path) -> None:
    """--no_ssh takes only the number of ranks from the hostfile."""
    (folder / "hostfile").write_text("localhost slots=2\n")
    trains(folder, "--no_ssh", "--node_rank", "0")


@pytest.mark.full
@HIDES_DEVICES
def test_two_machines_of_a_hostfile(folder: Path) -> None:
    """The command of examples/slurm/README.md, with programs that stand for ssh and pdsh."""
    program(folder, "ssh", "#!/bin/sh\n")
    program(folder, "pdsh", PDSH)
    (folder / "hostfile").write_text("node1 slots=1\nnode2 slots=1\n")
    trains(folder, "--no_local_rank")
