"""Processes of this and other machines, told apart beyond doubt: a pid alone may be another's by now."""

import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Process:
    """machine: its boot and the process' name space of pids; started: clock ticks since that boot."""

    host: str
    machine: str
    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "Process":
        """A process of this machine."""
        return cls(socket.gethostname(), _machine(), pid, _started(pid) or 0)

    def is_alive(self) -> bool:
        """Of one of this machine: it is the same process still, and no zombie."""
        return _started(self.pid) == self.started

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def _machine() -> str:
    boot = space = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    return f"{boot} {space}"


def _started(pid: int) -> int | None:
    """None: there is no such process."""
    try:
        # The name, in parentheses, may hold anything; then come state (Z: a zombie), ppid, ...
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
