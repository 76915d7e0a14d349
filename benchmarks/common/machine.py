"""What a measurement was made on, and the process it is made in."""

import platform
from importlib import metadata
from pathlib import Path

import torch

from megamoe.compat.glibc import keep_freed_memory

PACKAGES = ("torch", "transformers", "deepspeed", "megatron-core")


def settle_process() -> None:
    """Call once before anything is measured: the process-wide settings that training runs under."""
    keep_freed_memory()


def versions() -> dict[str, str | int]:
    """Versions, the CPU and the number of threads, by name."""
    found: dict[str, str | int] = {"python": platform.python_version()}
    found |= {name: version_of(name) for name in PACKAGES}
    return found | {"cpu": cpu_model(), "threads": torch.get_num_threads()}


def version_of(package: str, otherwise: str = "none") -> str:
    """Return the version of a package, or `otherwise` if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return otherwise


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
