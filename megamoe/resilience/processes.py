"""Identifying processes of this and other machines. A pid alone does not: it may have been reused."""

import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Process:
    """A process. machine: the boot ID and the PID namespace. started: in clock ticks since that boot."""

    host: str
    machine: str
    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "Process":
        """Return the process of this machine that has the pid."""
        return cls(socket.gethostname(), _machine(), pid, _started(pid) or 0)

    def is_alive(self) -> bool:
        """Return whether a process of this machine still runs; a zombie does not."""
        return _started(self.pid) == self.started

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data for JSON."""
        return asdict(self)


def _machine() -> str:
    boot = space = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    return f"{boot} {space}"


def _started(pid: int) -> int | None:
    """Return when the process started, in clock ticks since the boot; None if it does not run."""
    try:
        # The name, in parentheses, may hold anything; then come state (Z: a zombie), ppid, ...
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
