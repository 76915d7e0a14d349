"""The exception for users' mistakes, and the program's exit codes."""

import re
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from megamoe.redaction import redact

# Messages of gloo, NCCL, the store and the loader when the peer process is gone.
LOST_CONTACT = re.compile(
    r"connection (was )?(closed|reset)|broken pipe|socket closed|remote process (has )?exited|recv.*failed"
    r"|connectFullMesh failed|timed out waiting|(?<!dataloader )timed out after|failed to (recv|connect)"
    r"|ncclRemoteError|ncclSystemError|NCCL communicator was aborted|Watchdog caught collective",
    re.IGNORECASE,
)
LONGEST_LINE = 2000  # characters of a message
LONGEST_SECRET = 4096  # characters: a part of one would not be recognised
DEAD_LOADER = re.compile(r"DataLoader (worker|timed out)", re.IGNORECASE)


class UserError(ValueError):
    """Bad input: a key, a file or a combination that the user can correct.

    The message is one line that names the key or file, the value found, what was expected and the way out.
    Entry points print it without a traceback and exit with code 2. Every other exception is a bug and keeps
    its traceback. What it quotes of libraries, files and configurations loses its secrets here, and is
    printable.
    """

    def __init__(self, *lines: object) -> None:
        super().__init__(*(redact(line) if isinstance(line, str) else line for line in lines))

    def __str__(self) -> str:
        return printable(" ".join(str(self.args[0]).split()) if self.args else "", LONGEST_LINE)


class ConfigError(UserError):
    """A configuration that does not fit the schema. `args` are its problems, a line each; the message is the
    first of them.
    """


class PluginError(UserError):
    """What a plugin's part raised while it was called; `__cause__` is its own exception.

    If that means lost contact or missing memory, entry points report it as such.
    """


class Problem(NamedTuple):
    """One reason why a run cannot start; as text it is the line of its UserError.

    key: of the configuration, such as `model.head_size`, or the file. message: the value found, what was
    expected and the way out.
    """

    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.message else self.key

    @classmethod
    def of(cls, error: UserError) -> "Problem":
        """Return the problem that an error tells; its key is what stands before the first colon."""
        key, _, message = str(error).partition(": ")
        return cls(key, message)


def raise_first(problems: Iterable[Problem]) -> None:
    """Raise UserError with the first of the problems, if there is one."""
    for problem in problems:
        raise UserError(str(problem))


class ExitCode(IntEnum):
    """The exit code of a rank's process; docs/run/runs.md says how launchers react to it."""

    FINISHED = 0  # or a planned stop: train.exit_after_*
    UNEXPECTED = 1  # a bug, or a failure of another rank or machine: start again to continue
    MISTAKE = 2  # a user's mistake, or training diverged: a restart would end the same way
    HANG = 70  # EX_SOFTWARE: ended by the watchdog
    STOPPED = 75  # EX_TEMPFAIL: stopped by a signal, after a save: start again to continue
    INTERRUPTED = 130  # 128 + SIGINT: Ctrl-C


def is_lost_contact(error: BaseException) -> bool:
    """Return whether the error means that another rank is gone. That rank reports the reason."""
    of_torch = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    return isinstance(error, RuntimeError | ConnectionError) and (
        of_torch or (bool(LOST_CONTACT.search(str(error))) and not DEAD_LOADER.search(str(error)))
    )


def printable(text: object, length: int = 300) -> str:
    """Return text from a file as one line without control characters and secrets, shortened in its middle."""
    whole, most = str(text), length + LONGEST_SECRET
    cut = redact(whole if len(whole) <= 2 * most else whole[:most] + whole[-most:])
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
    return line if len(line) <= length else f"{line[: length - length // 2 - 3]}...{line[-(length // 2) :]}"


def listed(names: Sequence[object], most: int = 12) -> str:
    """Return the first names of a list as one line; those from a file may be anything."""
    shown = ", ".join(printable(name, 40) for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
