"""Loads a CUDA device for fake tensors into a PyTorch that was built without CUDA. Imports no torch.

Without it PyTorch's autograd refuses fake CUDA tensors. PyTorch asks for a device once, while it is imported.
"""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from megamoe.errors import UserError

SOURCE = Path(__file__).with_name("cuda_device.cpp")
BUILD_TIMEOUT_S = 120
FLAGS = ("-O0", "-w", "-shared", "-fPIC", "-std=c++20")


@cache
def load() -> None:
    """Build and load the device, in about 3 s; do nothing where PyTorch was built with CUDA.

    Raises:
        UserError: if torch is already imported, the device cannot be built, or PyTorch is built with CUDA
            and there is no device.
    """
    if "torch" in sys.modules:
        raise UserError("simulation: torch is imported already; call simulation.cuda_device.load before that")
    # DeepSpeed would choose the CPU on a machine without a GPU.
    os.environ["DS_ACCELERATOR"] = "cuda"
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise UserError("simulation: PyTorch is not installed")
    root = Path(spec.origin).parent
    if (root / "lib" / "libtorch_cuda.so").exists():
        if not Path("/dev/nvidiactl").exists():
            raise UserError(
                "simulation: this PyTorch is built with CUDA, and this machine has no CUDA device; install "
                "PyTorch's CPU build (https://download.pytorch.org/whl/cpu), or take a machine with a device"
            )
        return
    with tempfile.TemporaryDirectory(prefix="megamoe-device-") as folder:
        library = Path(folder) / "cuda_device.so"
        _build(root, library)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _build(root: Path, library: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler:
        raise UserError("simulation: no C++ compiler was found; install g++")
    headers = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    libraries = [f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib"]
    command = [compiler, *FLAGS, *headers, str(SOURCE), *libraries, "-o", str(library)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"simulation: {compiler} cannot be run: {error}") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise UserError(f"simulation: the fake CUDA device cannot be built: {errors[0]}")
