"""The pretended device's library: built once for a PyTorch and a compiler, as the CPU kernels are.

It needs PyTorch's headers, which the wheel has. Only a PyTorch without CUDA can load it: another one has that
device already.
"""

import os
import shutil
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from megamoe.cpu_kernels.build import BuildError, cached, run

SOURCES = sorted(Path(__file__).parent.glob("*.[ch]*"))
FLAGS = ["-O0", "-w", "-shared", "-fPIC", "-std=c++20"]
BUILD_TIMEOUT_S = 600


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
    parts = [run([compiler, "--version"], BUILD_TIMEOUT_S), version("torch"), str(torch), *FLAGS]
    parts += [path.read_text() for path in SOURCES if path.suffix != ".py"]
    return cached("pretended_device", parts, [compiler, *FLAGS, *_paths(torch)], BUILD_TIMEOUT_S)


def _paths(torch: Path) -> list[str]:
    """The source, PyTorch's headers and its libraries."""
    headers = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
    return ["-DUSE_C10D", *headers, str(Path(__file__).parent / "device.cpp"), *libraries]
