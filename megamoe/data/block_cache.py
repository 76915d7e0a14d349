"""Blocks of files that are kept on a local disk, within a limit that the processes of a machine share.

The root of all has `blocks.json`: the bytes that the blocks of all files may have together, and have. A block
is a file in a folder NAME.blocks below the root.
"""

import errno
import fcntl
import json
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megamoe.io import TEMPORARY, read_json, replace_file

BLOCKS, STATE = ".blocks", "blocks.json"
STALE_S = 3600.0  # a temporary file of this age is a killed process'
KEPT_SHARE = 0.9  # of the limit, when blocks are deleted
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is made if it is missing; it is freed if this process is killed.

    It is freed by name, not by closing the file, which a process that was forked meanwhile has open too.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


@contextmanager
def locked_byte(path: Path, number: int) -> Iterator[None]:
    """Hold the lock of one byte of a file, between threads too. A file that cannot be made locks nothing."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield
        return

    def set_lock(kind: int) -> None:
        # struct flock: l_type, l_whence, l_start, l_len, l_pid. The lock is the open file's, and ends with
        # it, also if the process is killed.
        with suppress(OSError):
            fcntl.fcntl(handle, fcntl.F_OFD_SETLKW, struct.pack("hhqqi4x", kind, os.SEEK_SET, number, 1, 0))

    try:
        set_lock(fcntl.F_WRLCK)
        yield
    finally:
        set_lock(fcntl.F_UNLCK)
        os.close(handle)


class BlockCache:
    """The blocks of all files below one root, which processes share."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._state = root / STATE
        self._is_told = False

    def limit(self, most_bytes: int) -> None:
        """Set the bytes that all blocks may have together; the one who says it last decides."""
        with self._locked() as state:
            state["most"] = most_bytes

    def add(self, path: Path, block: bytes, *, evicts: bool = True) -> bool:
        """Keep a block, and delete those that were not used for longest; return whether it is kept.

        evicts: whether others may be deleted for it. A full disk, or a folder that cannot be written, is told
        once.
        """
        if not self._reserve(len(block), evicts):
            return False
        for is_last in (not evicts, True):
            try:
                path.parent.mkdir(exist_ok=True)
                _place(path, block)
                return True
            except OSError as error:
                if error.errno in NO_SPACE and not is_last:
                    with suppress(OSError), self._locked() as state:
                        used = self._evict(state, keeps=state["used"] - 3 * len(block))
                        state["used"] = used + len(block)
                    continue
                if evicts and not self._is_told:
                    self._is_told = True
                    told_once = f"data.remote_cache: {path.parent} cannot keep blocks: {error.strerror}"
                    print(f"warning: {told_once}; they are fetched each time", file=sys.stderr, flush=True)
                with suppress(OSError), self._locked() as state:
                    state["used"] -= len(block)
                return False
        raise AssertionError

    def _reserve(self, size: int, evicts: bool) -> bool:
        try:
            with self._locked() as state:
                if state["used"] + size > state["most"]:
                    if not evicts:
                        return False
                    state["used"] = self._evict(
                        state, keeps=min(state["most"] - size, KEPT_SHARE * state["most"])
                    )
                if state["used"] + size > state["most"]:
                    return False  # a block is larger than all may be
                state["used"] += size
                return True
        except OSError:
            return True  # the caller finds out, and tells it

    @contextmanager
    def _locked(self) -> Iterator[dict[str, int]]:
        """Yield the state, which is written back; it is counted anew if it is missing or damaged."""
        self._root.mkdir(parents=True, exist_ok=True)
        with locked(self._root / ".lock"):
            try:
                content = read_json(self._state, 1 << 12)
                state = {"most": int(content["most"]), "used": int(content["used"])}
            except (OSError, ValueError, TypeError, KeyError, OverflowError):
                state = {"most": 0, "used": sum(size for _, size, _ in self._found())}
            yield state
            replace_file(self._state, json.dumps(state).encode())

    def _found(self) -> list[tuple[int, int, str]]:
        """Return last use (ns), size and path of all blocks; delete what killed processes have left."""
        found = []
        for folder, _, names in os.walk(self._root):
            if not folder.endswith(BLOCKS):
                continue
            for name in names:
                path = os.path.join(folder, name)
                with suppress(OSError):
                    status = os.stat(path)
                    if not name.endswith(TEMPORARY):
                        used_ns = max(status.st_atime_ns, status.st_mtime_ns)  # `touch` sets the first
                        found.append((used_ns, status.st_size, path))
                    elif status.st_mtime < time.time() - STALE_S:
                        os.unlink(path)
        return found

    def _evict(self, state: dict[str, int], keeps: float) -> int:
        """Delete the blocks that were not used for longest until `keeps` bytes are left; return what is."""
        blocks = sorted(self._found())
        used = sum(size for _, size, _ in blocks)
        for _, size, path in blocks:
            if used <= keeps:
                break
            with suppress(OSError):
                os.unlink(path)
            used -= size
        return used


def touch(handle: int, status: os.stat_result) -> None:
    """Note that an open block is used now; the time of its content stays."""
    with suppress(OSError):
        os.utime(handle, ns=(time.time_ns(), status.st_mtime_ns))


def _place(path: Path, block: bytes) -> None:
    """Write a block and put it in place, when it is on the disk, in one move."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}{TEMPORARY}")
    try:
        with temporary.open("wb", buffering=0) as file:
            if file.write(block) != len(block):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
