"""Processes of launches: identified beyond their pid, the lock of a run's folder, restarts by torchrun."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from megamoe.errors import UserError
from megamoe.io import read_json
from megamoe.parallel.consensus import gather_from_ranks


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


@contextmanager
def locked(run_folder: Path) -> Iterator[None]:
    """Hold the run folder's lock. The kernel releases it when the process ends, however it ends.

    It is a POSIX lock, which NFS supports and which loader processes do not inherit. Its file lies beside the
    folder, because the folder may be replaced. On a file system without locks nothing is locked.

    Raises:
        UserError: if another process holds the lock, or the file cannot be written.
    """
    path = run_folder.with_name(f".{run_folder.name}.lock")
    was_there = path.parent.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _open(path)
    except BlockingIOError as error:
        raise UserError(
            f"run folder {run_folder} is in use ({error.strerror}): stop that launch or wait for its end, or "
            f"choose another name=...; if its machine is gone for good, remove {path}"
        ) from None
    except OSError as error:
        raise UserError(f"output: cannot write the run folder {run_folder}: {error.strerror}") from None
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            if not was_there:
                with suppress(OSError):  # removes the folder that was made for the file, if it is empty
                    path.parent.rmdir()


def _open(path: Path) -> IO[str]:
    """Return the lock's file, open and locked.

    Raises:
        BlockingIOError: if another process has locked it; its strerror names that process.
    """
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.seek(0)
            owner = "".join(c for c in file.read(200) if c.isprintable())
            raise BlockingIOError(errno.EAGAIN, owner or "by another process") from None
    if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
        return _open(path)  # its holder has removed it just now
    with suppress(OSError):  # the content is for messages alone
        file.truncate(0)
        file.write(f"{socket.gethostname()}, pid {os.getpid()}")
        file.flush()
    return file


LAUNCH, LARGEST_LAUNCH = "launch.json", 1 << 24
Mark = list[str | int]


@dataclass(frozen=True)
class Launch:
    """One call of torchrun. latest: the name and time of the folder's newest checkpoint when it started."""

    run_id: str
    agents: list[dict[str, Any]]
    latest: Mark | None

    @classmethod
    def gathered(cls, latest: Path | None) -> "Launch | None":
        """Return this launch, or None if it is not torchrun's, whose ranks nobody restarts. Collective."""
        run_id = _run_id()
        own_agent = None if run_id is None else _agent()
        marked = mark(latest)  # before the collective: after it the first rank may move the folder
        agents = [agent for agent in gather_from_ranks(own_agent) if agent is not None]
        if run_id is None:
            return None
        return cls(run_id, [agent for n, agent in enumerate(agents) if agent not in agents[:n]], marked)

    @classmethod
    def restarted(cls, folder: Path) -> "Launch | None":
        """Return the launch that made the folder, if it has restarted this process; else None."""
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            return None
        try:
            launch = cls(**read_json(folder / LAUNCH, LARGEST_LAUNCH))
        except (OSError, ValueError, TypeError):
            return None
        return launch if launch.run_id == _run_id() and _agent() in launch.agents else None

    def dump(self) -> str:
        """Return the content of launch.json."""
        return json.dumps(asdict(self), indent=1)


def mark(checkpoint: Path | None) -> Mark | None:
    """Return what identifies a checkpoint: its name and time, for its step may be saved again."""
    return None if checkpoint is None else [checkpoint.name, checkpoint.stat().st_mtime_ns]


def _run_id() -> str | None:
    return os.environ.get("TORCHELASTIC_RUN_ID")


def _agent() -> dict[str, Any]:
    return Process.of(os.getppid()).to_dict()
