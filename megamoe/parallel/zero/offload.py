"""Offload: which of a rank's states the DeepSpeed file moves off the device, and whether this is possible."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megamoe.errors import UserError

Section = Literal["offload_optimizer", "offload_param"]
# The ZeRO stages that support each offload.
STAGES = {
    ("offload_optimizer", "cpu"): (1, 2, 3),
    ("offload_optimizer", "nvme"): (3,),
    ("offload_param", "cpu"): (3,),
    ("offload_param", "nvme"): (3,),
}


@dataclass(frozen=True)
class Offload:
    """Where optimiser state and parameters are stored: none (the device), cpu or nvme."""

    optimizer: str = "none"
    parameters: str = "none"


def read_offload(content: dict[str, Any]) -> Offload:
    """Return the offload settings of a DeepSpeed file's content."""
    return Offload(offload_device(content, "offload_optimizer"), offload_device(content, "offload_param"))


def offload_device(content: dict[str, Any], section: Section) -> str:
    """Return none, cpu or nvme."""
    offload = content.get("zero_optimization", {}).get(section) or {}
    device: str = offload.get("device", "none")
    return device


def check_offload(where: str, content: dict[str, Any], stage: int) -> None:
    """Refuse offload settings that DeepSpeed would accept, or refuse only after building half of the model.

    where: the file, for the messages; its keys are already checked.

    Raises:
        UserError: naming the key, what was expected and the way out.
    """
    sections: tuple[Section, ...] = ("offload_optimizer", "offload_param")
    devices = {section: offload_device(content, section) for section in sections}
    for section, device in devices.items():
        if device == "none":
            continue
        stages = STAGES[section, device]
        if stage not in stages:
            raise UserError(
                f"{where}: zero_optimization.{section}.device is {device!r} at stage {stage}; it needs stage "
                f"{' or '.join(map(str, stages))}"
            )
        if device == "nvme":
            _check_folder(where, section, content["zero_optimization"][section].get("nvme_path"))
    if devices["offload_param"] != "none" and devices["offload_optimizer"] == "none":
        raise UserError(
            f"{where}: zero_optimization.offload_param.device is {devices['offload_param']!r} without "
            "offload_optimizer; offload the optimiser too, to cpu or nvme"
        )
    if "nvme" in devices.values():
        _check_async_io(where)


def _check_folder(where: str, section: Section, path: str | None) -> None:
    key = f"zero_optimization.{section}.nvme_path"
    if path is None:
        raise UserError(
            f"{where}: {key} is missing, which device 'nvme' needs; name a folder on a local disk"
        )
    if not Path(path).is_dir() or not os.access(path, os.W_OK | os.X_OK):
        raise UserError(
            f"{where}: {key}: {path} is no folder that this user can write in; make it on every machine, or "
            "name another"
        )


def _check_async_io(where: str) -> None:
    """Check DeepSpeed's NVMe op, which is compiled at its first use."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise UserError(
            f"{where}: offload to 'nvme' needs DeepSpeed's async_io op, which cannot be built here; install "
            "libaio with its headers (Debian: apt-get install libaio-dev) and ninja, or set device: cpu"
        )
