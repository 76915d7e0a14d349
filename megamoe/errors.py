"""The one exception that stands for a user's mistake, and what the program's exit codes mean."""

from enum import IntEnum


class UserError(ValueError):
    """Bad input: a key, a file or a combination that the user can put right.

    The message is one line that names the key or file, the value found, what was expected and
    the way out. Entry points print it without a traceback and exit with code 2; everything else
    that is raised is a defect of the program and keeps its traceback.
    """


class ExitCode(IntEnum):
    """With what a rank's process ends; docs/runs.md says what launchers make of it."""

    FINISHED = 0  # or a planned stop: train.exit_after_*
    UNEXPECTED = 1  # a defect, or a fault of another rank or machine: start again to go on
    MISTAKE = 2  # the user's, or training broke: as it stands it would end the same again
    HANG = 70  # EX_SOFTWARE: ended by the watchdog
    STOPPED = 75  # EX_TEMPFAIL: told to stop by a signal, and saved: start again to go on
    INTERRUPTED = 130  # 128 + SIGINT: Ctrl-C


def printable(text: object, length: int = 300) -> str:
    """One line, whatever a file's content or name may hold: no control characters, cut where it is long."""
    cut = str(text)[: length + 1]
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
    return line if len(line) <= length else f"{line[: length - 3]}..."
