"""Section `environment`: devices, drivers and versions."""

import os
import platform
import shutil
import subprocess

import torch

from common.machine import version_of
from gpu.findings import Machine, Section

PACKAGES = ("torch", "triton", "deepspeed", "megatron-core", "transformer-engine", "apex", "transformers")
QUERY = (
    "name,driver_version,memory.total,memory.used,clocks.max.sm,power.limit,"
    "ecc.errors.uncorrected.volatile.total"
)


def run(machine: Machine, section: Section) -> None:
    """Report what the machine has; nothing is required."""
    section.add("host", platform.node())
    section.add("processors", len(os.sched_getaffinity(0)))
    section.add("Python", platform.python_version())
    for name in PACKAGES:
        section.add(name, version_of(name, "not installed"))
    section.add("CUDA of PyTorch", torch.version.cuda or "none")
    if machine.device == "cpu":
        return
    section.add("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    for number in range(machine.count):
        found = torch.cuda.get_device_properties(number)
        capability = f"{found.major}.{found.minor}"
        text = f"{found.name}, {found.total_memory / 2**30:.1f} GiB, compute capability {capability}"
        section.add(f"device {number}", f"{text}, {found.multi_processor_count} multiprocessors")
    for number, line in enumerate(_driver_lines()):
        section.add(f"driver's view of device {number}", line, note=QUERY)


def _driver_lines() -> list[str]:
    """Return a line for each device of the machine, as `nvidia-smi` prints it; none without that program."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return found.stdout.splitlines() if found.returncode == 0 else []
