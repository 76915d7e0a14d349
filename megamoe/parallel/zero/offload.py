"""Offload: which of a rank's states the DeepSpeed file moves off the device."""

from dataclasses import dataclass
from typing import Any, Literal

Section = Literal["offload_optimizer", "offload_param"]


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
