"""Ends a rank when its launcher ends.

It imports only the standard library: importing PyTorch takes seconds, in which the launcher may be killed.
"""

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

from megamoe.compat.glibc import signal_at_parents_end

LAUNCHERS = ("python", "pypy", "torchrun", "deepspeed")  # in the name of a launcher's program
CONNECT_S = 2.0


def end_with_launcher() -> None:
    """Have the kernel send SIGTERM to this rank when torchrun's agent or DeepSpeed's launcher ends.

    Without it the rank would continue to train unobserved. If the launcher is already gone, the signal comes
    at once. Without such a launcher nothing is done: a shell may end before its processes, and so may the
    parent of a launcher.
    """
    if not is_launched():
        return
    signal_at_parents_end(signal.SIGTERM)
    if not may_have_launcher(os.getppid()) or _agent_store_is_gone():
        os.kill(os.getpid(), signal.SIGTERM)


def is_launched() -> bool:
    """Whether torchrun or the deepspeed launcher started this process as a rank."""
    variables = os.environ
    # CROSS_RANK is DeepSpeed's.
    return "RANK" in variables and ("TORCHELASTIC_RUN_ID" in variables or "CROSS_RANK" in variables)


def may_have_launcher(parent: int, proc: Path = Path("/proc")) -> bool:
    """Whether a launcher, which is a Python program, is among the ancestors; True if this cannot be found
    out.

    An orphan's parent is init or a subreaper (systemd, tini, slurmstepd). A parent with pid 1 proves little:
    in a container the launcher itself may be process 1. A script may stand between the launcher and the rank.
    """
    while parent > 0:
        folder = proc / str(parent)
        try:
            program = (folder / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
            # The name, in parentheses, may hold anything; then come the state and the parent's pid.
            above = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return True
        names = [program]
        with suppress(OSError):  # of another user's process
            names.append(os.readlink(folder / "exe"))
        if any(launcher in Path(name).name for name in names for launcher in LAUNCHERS):
            return True
        if above == 0:
            return parent != 1  # other than init: its parent is in another pid namespace
        parent = above
    return True


def _agent_store_is_gone() -> bool:
    """Whether torchrun's agent on this machine hosted the ranks' store and no longer listens there."""
    variables = os.environ
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or variables.get("GROUP_RANK") != "0":
        return False
    try:
        address = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
        socket.create_connection(address, timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, KeyError, ValueError):
        pass
    return False
