"""The memory that is available to this process: the kernel's count, and the limits of its cgroups.

Sources: Linux, Documentation/filesystems/proc.rst (MemAvailable), Documentation/admin-guide/cgroup-v2.rst
(memory.max) and cgroup-v1/memory.rst (memory.limit_in_bytes).
"""

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
# For cgroup v2 and v1: the files of the limit and the usage, and the reclaimable entries of memory.stat.
FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return the bytes that can still be allocated, including swap; None if the kernel does not say.

    proc, cgroups: the mount points of the two file systems.
    """
    left, kib = [*_of_cgroups(proc, cgroups)], _numbers(proc / "meminfo")
    if "MemAvailable" in kib:
        left.append(1024 * (kib["MemAvailable"] + kib.get("SwapFree", 0)))
    return max(0, min(left)) if left else None


def _of_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Return the free bytes of the process' cgroup and of those that contain it."""
    for line in _lines(proc / "self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            version, mount = 2, cgroups
        elif "memory" in controllers.split(","):
            version, mount = 1, cgroups / "memory"
        else:
            continue
        own = Path(path.lstrip("/"))
        for inside in (own, *own.parents):
            yield from _left_in(mount / inside, *FILES[version])


def _left_in(folder: Path, limit_file: str, used_file: str, reclaimable: str) -> Iterator[int]:
    limit, used = ("".join(_lines(folder / name)) for name in (limit_file, used_file))
    if limit.isdigit() and used.isdigit():  # "max": no limit
        yield int(limit) - int(used) + _numbers(folder / "memory.stat").get(reclaimable, 0)


def _numbers(path: Path) -> dict[str, int]:
    """Parse lines such as `MemAvailable:  123 kB` and `inactive_file 123`."""
    words = [line.replace(":", " ").split() for line in _lines(path)]
    return {pair[0]: int(pair[1]) for pair in words if len(pair) > 1 and pair[1].isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
