"""A lock for a run's folder: two launches in it would delete and replace each other's checkpoints."""

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
