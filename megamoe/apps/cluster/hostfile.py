"""Starting ranks by DeepSpeed's launcher, after a check of the hostfile and of its machines."""

import re
import shutil
import subprocess
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megamoe.errors import UserError, printable
from megamoe.io import read_plain, reason

LARGEST = 1 << 24
LINE = re.compile(r"(\S+)\s+slots=([0-9]{1,4})(\s+#.*)?")
SSH_S = 10  # for a machine to answer
TRIALS = 64  # of ssh at the same time
INSTEAD = "or start the ranks by srun or torchrun (examples/slurm/README.md)"


def launch_with_deepspeed(arguments: list[str]) -> None:
    """Do what `deepspeed ARGUMENTS` does, after the checks. Exits with the launcher's code if that is not 0.

    Raises:
        UserError: for a hostfile, machine, program or option that is wrong.
    """
    from deepspeed.launcher import runner

    options = runner.parse_args(arguments)
    try:
        if options.hostfile != runner.DLTS_HOSTFILE or Path(options.hostfile).exists():
            machines = runner.parse_inclusion_exclusion(
                read_hostfile(Path(options.hostfile)), options.include, options.exclude
            )
            machines = runner.apply_num_nodes_and_gpus(machines, options.num_nodes, options.num_gpus)
            check_machines(options, list(machines))
        runner.main(arguments)
    except UserError:
        raise
    except (ValueError, RuntimeError, AssertionError, subprocess.SubprocessError) as error:
        # The launcher's own, about its options. Errors of the ranks are exit codes.
        raise UserError(f"deepspeed: {printable(error)}") from None


def read_hostfile(path: Path) -> dict[str, int]:
    """Return the slots of each machine.

    Raises:
        UserError: if the file cannot be read or has a line that is not `NAME slots=N`.
    """
    try:
        lines = read_plain(path, LARGEST).decode("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(
            f"--hostfile {path}: {reason(error)}; name a file with lines such as 'node1 slots=8'"
        ) from None
    found: dict[str, int] = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        if match is None or int(match[2]) == 0:
            raise UserError(
                f"{path}:{number}: found '{printable(line, 80)}', expected 'NAME slots=N' with N above 0"
            )
        if match[1] in found:
            raise UserError(f"{path}:{number}: {match[1]} is there twice; give each machine one line")
        found[match[1]] = int(match[2])
    if not found:
        raise UserError(f"{path}: no machine; expected lines such as 'node1 slots=8'")
    return found


def check_machines(options: Namespace, hosts: list[str]) -> None:
    """Refuse if ssh or pdsh is missing, or a machine does not answer.

    Raises:
        UserError: naming what is missing, or the machines.
    """
    if options.no_ssh:
        return
    needed = [] if options.no_ssh_check and options.master_addr else ["ssh"]
    if len(hosts) > 1 or options.force_multi:
        needed += ["ssh", "pdsh"] if options.launcher.lower() == "pdsh" else []
    for program in needed:
        if shutil.which(program) is None:
            raise UserError(f"{program} is not installed here, and deepspeed needs it: install it, {INSTEAD}")
    if options.no_ssh_check:
        return
    with ThreadPoolExecutor(TRIALS) as threads:
        answers = list(threads.map(lambda host: _answers(host, options.ssh_port), hosts))
    silent = [host for host, answered in zip(hosts, answers, strict=True) if not answered]
    if silent:
        raise UserError(
            f"--hostfile {options.hostfile}: no answer by ssh without a password from {', '.join(silent[:8])}"
            f"{', ...' if len(silent) > 8 else ''}: try `ssh {silent[0]} hostname`, and correct the hostfile"
        )


def _answers(host: str, port: int | None) -> bool:
    """Return whether `ssh HOST true` works without a password."""
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={SSH_S}"]
    command += [] if port is None else ["-p", str(port)]
    try:
        done = subprocess.run([*command, "--", host, "true"], capture_output=True, timeout=2 * SSH_S)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
