"""The pretended device's library: built once for a PyTorch and a compiler, as the CPU kernels are.

It needs PyTorch's headers, which the wheel has. Only a PyTorch without CUDA can load it: another one has that
device already.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCES = sorted(Path(__file__).parent.glob("*.[ch]*"))
FLAGS = ["-O0", "-w", "-shared", "-fPIC", "-std=c++20"]
BUILD_TIMEOUT_S = 600


class BuildError(Exception):
    """The library cannot be built; the message has the reason."""


def built() -> Path:
    """The library's file. Does not import torch.

    Raises:
        BuildError: where there is no GCC, or it fails.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler:
        raise BuildError("no C++ compiler was found; install g++")
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed")
    torch = Path(spec.origin).parent
    if (torch / "lib/libtorch_cuda.so").exists():
        raise BuildError("this PyTorch is built for CUDA")
    parts = [_run([compiler, "--version"]), version("torch"), str(torch), *FLAGS]
    parts += [path.read_text() for path in SOURCES if path.suffix != ".py"]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megamoe"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"pretended_device-{name}.so"
    if not path.is_file():
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as own:
            fresh = Path(own) / path.name
            _run([compiler, *FLAGS, *_paths(torch), "-o", str(fresh)])
            fresh.replace(path)
    return path


def _paths(torch: Path) -> list[str]:
    """The source, PyTorch's headers and its libraries."""
    headers = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
    return ["-DUSE_C10D", *headers, str(Path(__file__).parent / "device.cpp"), *libraries]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} failed: {said[0] if said else f'exit code {done.returncode}'}")
    return done.stdout
