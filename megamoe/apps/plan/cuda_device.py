"""Loads a CUDA device for fake tensors into a PyTorch that was built without CUDA. Imports no torch.

Without it PyTorch's autograd refuses fake CUDA tensors. PyTorch asks for a device once, while it is imported.
"""

import ctypes
import importlib.util
import os
import shutil
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

from megamoe.cpu_kernels.build import BuildError, cached, run
from megamoe.errors import UserError

SOURCE = Path(__file__).with_name("cuda_device.cpp")
BUILD_TIMEOUT_S = 120
FLAGS = ("-O0", "-w", "-shared", "-fPIC", "-std=c++20")


@cache
def load() -> None:
    """Load the device; do nothing where PyTorch was built with CUDA.

    The first call on a machine builds it, in about 3 s.

    Raises:
        UserError: if torch is already imported, the device cannot be built, or PyTorch is built with CUDA
            and there is no device.
    """
    if "torch" in sys.modules:
        raise UserError("simulation: torch is imported already; call apps.plan.cuda_device.load before that")
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
    ctypes.CDLL(str(_built(root)), mode=ctypes.RTLD_GLOBAL)


def _built(root: Path) -> Path:
    """Return the library's file."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler:
        raise UserError("simulation: no C++ compiler was found; install g++")
    headers = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    libraries = [f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib"]
    command = [compiler, *FLAGS, *headers, str(SOURCE), *libraries]
    try:
        made_of = [
            run([compiler, "--version"], BUILD_TIMEOUT_S),
            version("torch"),
            SOURCE.read_text(),
            *command,
        ]
        return cached("fake_cuda_device", made_of, command, BUILD_TIMEOUT_S)
    except BuildError as error:
        raise UserError(f"simulation: the fake CUDA device cannot be built: {error}") from None
