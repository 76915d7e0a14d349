"""This process's resident memory, as Linux counts it."""

from pathlib import Path

RESET_PEAK = "5"  # see proc(5), clear_refs


def forget_peak() -> None:
    """Reset the peak that `peak` returns."""
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)


def peak() -> int:
    """Return the peak since the start or the last reset, in bytes."""
    return _status("VmHWM")


def now() -> int:
    """Return the resident memory now, in bytes."""
    return _status("VmRSS")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))
