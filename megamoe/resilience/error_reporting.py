"""How a launch ends that cannot go on: one line that says why, the exit code, and never a long wait.

Knows neither torch nor the vendors: it also tells what goes wrong before they are imported.
"""

import errno
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from megamoe.errors import ExitCode, UserError

PATIENCE_S = 20  # for which the other ranks of a machine wait for the first one's word
CLOSING_LIMIT_S = 15  # after an error: of records, loader processes, the process group; launchers kill at 30
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
UNWRITABLE = (*DISK_FULL, errno.EROFS)
TRACEBACK = "MEGAMOE_TRACEBACK"  # set to 1: the traceback of every error comes with its line
# What gloo, NCCL, the store and the loader say when a process at the other end has gone.
LOST_CONTACT = re.compile(
    r"connection (was )?(closed|reset)|broken pipe|socket closed|remote process (has )?exited|recv.*failed"
    r"|connectFullMesh failed|timed out waiting|(?<!dataloader )timed out after|failed to (recv|connect)"
    r"|ncclRemoteError|ncclSystemError|NCCL communicator was aborted|Watchdog caught collective",
    re.IGNORECASE,
)
DEAD_LOADER = re.compile(r"DataLoader (worker|timed out)", re.IGNORECASE)


def is_lost_contact(error: BaseException) -> bool:
    """Whether another rank has gone, of which its own line says why."""
    of_torch = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    return isinstance(error, RuntimeError | ConnectionError) and (
        of_torch or (bool(LOST_CONTACT.search(str(error))) and not DEAD_LOADER.search(str(error)))
    )


def explain(error: BaseException) -> tuple[ExitCode, str | None]:
    """The exit code and the line; None: nobody has foreseen it, and the traceback must tell."""
    text = "".join(
        it if it.isprintable() else it.encode("unicode_escape").decode()
        for it in " ".join(str(error).split())
    )
    if isinstance(error, UserError):
        return ExitCode.MISTAKE, text
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return ExitCode.MISTAKE, f"{_shortened(str(error.filename))}: {error.strerror}; shorten it"
    if isinstance(error, KeyboardInterrupt):
        return (
            ExitCode.INTERRUPTED,
            f"{_rank_name()}interrupted; go on from the last checkpoint with --resume",
        )
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        way_out = "free some space" if error.errno in DISK_FULL else "name another folder as output=..."
        name = error.filename or "output"
        line = (
            f"{name}: {error.strerror}; the checkpoints saved so far stay: {way_out}, and go on with --resume"
        )
        return ExitCode.MISTAKE, line
    if is_lost_contact(error):
        return ExitCode.UNEXPECTED, f"{_rank_name()}lost contact with another rank ({_shortened(text)})"
    if isinstance(error, RuntimeError) and DEAD_LOADER.search(text):
        return ExitCode.UNEXPECTED, f"{_rank_name()}a loader process died (data.workers): {_shortened(text)}"
    return ExitCode.UNEXPECTED, None


def tell(error: BaseException) -> ExitCode:
    """Print why the launch ends; returns the exit code.

    A user's mistake is told once by each machine, which may have one of its own (a missing file, say), by its
    first rank. The others wait meanwhile: a launcher ends all ranks as soon as one has ended. What is left of
    them then saw what the first did not.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):  # nothing is left to save
        with suppress(ValueError):  # not the main thread
            signal.signal(number, signal.SIG_DFL)
    code, _ = explain(error)
    if code is ExitCode.MISTAKE and _local_rank() > 0:
        time.sleep(PATIENCE_S)
    _print(error)
    return code


@contextmanager
def closing() -> Iterator[ExitStack]:
    """A stack of what must be closed; after an error it has CLOSING_LIMIT_S for that, and the process ends.

    Peers that are gone, a network file system or W&B's server can keep a rank waiting for minutes.
    """
    stack = ExitStack()
    try:
        yield stack
    except BaseException as error:
        timer = threading.Timer(CLOSING_LIMIT_S, _give_up, [error])
        timer.daemon = True
        timer.start()
        try:
            stack.close()
        except Exception as second:  # most often the first one again: a disk that is full, a peer gone
            raise error from (second if explain(error)[1] is None else None)
        finally:
            timer.cancel()
        raise
    stack.close()


def leave(code: int) -> None:
    """End the process now: the hooks at exit of torch, W&B and multiprocessing may wait for those gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _give_up(error: BaseException) -> None:
    _print(error)
    leave(explain(error)[0])


def _print(error: BaseException) -> None:
    """In one write: ranks share their stderr."""
    _, line = explain(error)
    text = "" if line is None else f"error: {_place()}{line}\n"
    if line is None or os.environ.get(TRACEBACK, "0") not in ("", "0"):
        trace = "".join(traceback.format_exception(error)).splitlines()
        prefix = f"[rank{_rank()}]: " if _rank() is not None else ""
        text = "".join(f"{prefix}{row}\n" for row in trace) + text
    sys.stderr.write(text)
    sys.stderr.flush()


def _rank() -> str | None:
    return os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or None


def _local_rank() -> int:
    text = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    return int(text) if text.isdecimal() else 0


def _rank_name() -> str:
    return "" if _rank() is None else f"rank {_rank()}: "


def _place() -> str:
    """The host, but for that of rank 0."""
    rank = _rank() or "0"
    return "" if rank in ("0", str(_local_rank())) or not rank.isdecimal() else f"{socket.gethostname()}: "


def _shortened(text: str, limit: int = 160) -> str:
    """Without the place in the library's source, nor its advice."""
    text = re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\] *", "", text)
    text = re.sub(r" This is typically caused by.*", "", text)
    return text if len(text) <= limit else text[: limit - 3] + "..."
