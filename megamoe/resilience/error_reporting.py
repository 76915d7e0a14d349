"""How an error ends a launch: one line with the reason, an exit code, and no long wait.

This file imports neither torch nor the vendors' libraries, so that it can also report errors of their import.
"""

import errno
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from megamoe.errors import DEAD_LOADER, ExitCode, PluginError, UserError, is_lost_contact, printable
from megamoe.redaction import redact

FIRST_RANK_WAIT_S = 20  # the other ranks of a machine wait so long for its first rank to report
CLOSING_LIMIT_S = 15  # to close everything after an error; launchers kill at 30
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
UNWRITABLE = (*DISK_FULL, errno.EROFS)
TRACEBACK = "MEGAMOE_TRACEBACK"  # set to 1: print the traceback of every error too
# PyTorch's allocator on the CPU raises a plain RuntimeError.
NO_MEMORY = re.compile(r"DefaultCPUAllocator: (not enough|can't allocate) memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory of the host or of a device was missing."""
    of_torch = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return isinstance(error, MemoryError) or of_torch or bool(NO_MEMORY.search(str(error)))


def explain(error: BaseException) -> tuple[ExitCode, str | None]:
    """Return the exit code and the line to print; None for an unforeseen error."""
    cause = error.__cause__
    if isinstance(error, PluginError) and cause and (is_lost_contact(cause) or is_out_of_memory(cause)):
        error = cause
    text = printable(" ".join(str(error).split()), 2000)
    if isinstance(error, UserError):
        return ExitCode.MISTAKE, text
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return ExitCode.MISTAKE, f"{_shorten(str(error.filename))}: {error.strerror}; shorten it"
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        way_out = "free some space" if error.errno in DISK_FULL else "name another folder as output=..."
        return ExitCode.MISTAKE, (
            f"{error.filename or 'output'}: {error.strerror}; the checkpoints saved so far stay: {way_out}, "
            "and go on with --resume"
        )
    rank, short = "" if _rank() is None else f"rank {_rank()}: ", _shorten(text)
    if isinstance(error, SystemExit):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return ExitCode.UNEXPECTED, (
            f"{rank}sys.exit({text}) was called at line {frame.lineno} of {frame.filename}; raise an error"
        )
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, f"{rank}interrupted; go on from the last checkpoint with --resume"
    if is_lost_contact(error):
        return ExitCode.UNEXPECTED, f"{rank}lost contact with another rank ({short})"
    if is_out_of_memory(error):
        return ExitCode.UNEXPECTED, (
            f"{rank}out of memory ({short or 'no memory is left'}); lower train.micro_batch_size or "
            "data.sequence_length, set model.recompute, or use more ranks"
        )
    if isinstance(error, RuntimeError) and DEAD_LOADER.search(text):
        return ExitCode.UNEXPECTED, f"{rank}a loader process died (data.workers): {short}"
    return ExitCode.UNEXPECTED, None


def report_error(error: BaseException) -> ExitCode:
    """Print why the launch ends; return the exit code.

    The first rank of each machine prints a user's mistake, once: machines can differ, for example by a
    missing file. The other ranks wait, for a launcher ends all ranks as soon as one has ended. A rank that is
    still alive after the wait has an error that the first rank does not have, and prints it.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):  # there is nothing left to save
        with suppress(ValueError):  # not the main thread
            signal.signal(number, signal.SIG_DFL)
    code, _ = explain(error)
    if code is ExitCode.MISTAKE and _local_rank() > 0:
        time.sleep(FIRST_RANK_WAIT_S)
    _print_error(error)
    return code


def hide_secrets() -> None:
    """Let no secret into what Python prints of itself: errors that nobody caught, and libraries' warnings."""

    def hook(kind: type[BaseException], error: BaseException | None, trace: Any) -> None:
        sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))

    sys.excepthook = hook
    threading.excepthook = lambda told: hook(told.exc_type, told.exc_value, told.exc_traceback)
    plain = warnings.formatwarning
    warnings.formatwarning = lambda *told, **more: redact(plain(*told, **more))
    if logging.lastResort is not None:  # of loggers without a handler, such as asyncio's and botocore's
        logging.lastResort.setFormatter(_Redacted("%(message)s"))


class _Redacted(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


@contextmanager
def closing() -> Iterator[ExitStack]:
    """Yield an ExitStack. After an error, the process ends if closing the stack takes over CLOSING_LIMIT_S.

    Peers that are gone, a network file system or W&B's server can block a rank for minutes.
    """
    stack = ExitStack()
    try:
        yield stack
    except BaseException as error:
        timer = threading.Timer(CLOSING_LIMIT_S, _exit_after_timeout, [error])
        timer.daemon = True
        timer.start()
        try:
            stack.close()
        except Exception as second:  # mostly from the same cause: a full disk, a lost peer
            raise error from (second if explain(error)[1] is None else None)
        finally:
            timer.cancel()
        raise
    stack.close()


def exit_process(code: int) -> None:
    """End the process now.

    Exit hooks of torch, W&B and multiprocessing are skipped: they may wait for lost peers.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_after_timeout(error: BaseException) -> None:
    _print_error(error)
    exit_process(explain(error)[0])


def _print_error(error: BaseException) -> None:
    """Print the error in one write, for the ranks share their stderr."""
    _, line = explain(error)
    text = "" if line is None else f"error: {_host_prefix()}{line}\n"
    if line is None or os.environ.get(TRACEBACK, "0") not in ("", "0"):
        trace = "".join(traceback.format_exception(error)).splitlines()
        prefix = f"[rank{_rank()}]: " if _rank() is not None else ""
        text = "".join(f"{prefix}{row}\n" for row in trace) + text
    sys.stderr.write(redact(text))
    sys.stderr.flush()


def _rank() -> str | None:
    return os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or None


def _local_rank() -> int:
    text = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    return int(text) if text.isdecimal() else 0


def _host_prefix() -> str:
    """Return the host's name as a prefix, or nothing on the host of rank 0."""
    rank = _rank() or "0"
    return "" if rank in ("0", str(_local_rank())) or not rank.isdecimal() else f"{socket.gethostname()}: "


def _shorten(text: str) -> str:
    """Return a library's message without its source location and advice, at most 160 characters."""
    text = re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\] *", "", text)
    text = re.sub(r" This is typically caused by.*", "", text)
    return text if len(text) <= 160 else text[:157] + "..."
