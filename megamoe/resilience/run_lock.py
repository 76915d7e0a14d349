"""One launch at a time in a run's folder: two would delete and replace each other's checkpoints."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from megamoe.errors import UserError


@contextmanager
def locked(run_folder: Path) -> Iterator[None]:
    """Inside, no other process gets in; the kernel lets go of the lock when this one ends, however it does.

    A POSIX lock of a file beside the folder, which may be replaced: NFS has such too, and loader processes
    do not inherit it. Where the file system has none, nothing is locked.

    Raises:
        UserError: if another process is in, or the file cannot be made.
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
                with suppress(OSError):  # as it was, if nothing came into it
                    path.parent.rmdir()


def _open(path: Path) -> IO[str]:
    """Locked.

    Raises:
        BlockingIOError: if another process has it locked; with that process' name.
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
        return _open(path)  # whose it was has just removed it
    with suppress(OSError):  # for the other's message alone
        file.truncate(0)
        file.write(f"{socket.gethostname()}, pid {os.getpid()}")
        file.flush()
    return file
