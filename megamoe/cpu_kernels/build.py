"""Compiles a shared library once on a machine. It does not import torch.

They are kept in $XDG_CACHE_HOME/megamoe (default ~/.cache/megamoe), under a hash of what they are made of.
"""

import atexit
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path


class BuildError(Exception):
    """The library cannot be built; the message has the reason."""


def cached(name: str, parts: Sequence[str], command: Sequence[str], timeout_s: float) -> Path:
    """Return the library of that name and these parts; if there is none, compile it.

    parts: the texts on which its content depends. command: the compiler and its arguments but for the output.

    Raises:
        BuildError: if the compiler fails.
    """
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    folder = _folder()
    path = folder / f"{name}-{digest}.so"
    if not _is_whole(path):
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as own:
            fresh = Path(own) / path.name
            run([*command, "-o", str(fresh)], timeout_s)
            digest = hashlib.sha256(fresh.read_bytes()).hexdigest()
            with fresh.open("ab") as file:  # the loader reads what the headers name alone
                file.write(digest.encode())
            fresh.chmod(0o700)
            fresh.replace(path)
    return path


def run(command: list[str], timeout_s: float) -> str:
    """Run a compiler and return what it prints.

    Raises:
        BuildError: if it cannot be run or fails, with its first error.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} failed: {said[0] if said else f'exit code {done.returncode}'}")
    return done.stdout


def _folder() -> Path:
    """Return the cache folder, or a temporary folder of this process if that cannot be written."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megamoe"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _is_ours(folder) and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    folder = Path(tempfile.mkdtemp(prefix="megamoe-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _is_whole(path: Path) -> bool:
    """Return whether a library is there as it was built: our plain file, which ends with its SHA-256."""
    if not (_is_ours(path) and stat.S_ISREG(path.lstat().st_mode)):
        return False
    content = path.read_bytes()
    return hashlib.sha256(content[:-64]).hexdigest().encode() == content[-64:]


def _is_ours(path: Path) -> bool:
    """Return whether the file exists, belongs to this user, and is writable for nobody else."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & 0o022
