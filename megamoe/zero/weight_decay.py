"""The weight decay that the configuration asks for, and where DeepSpeed cannot do it."""

from typing import Any

from megamoe.config.schema import OptimizerConfig
from megamoe.errors import UserError


def weight_decay(config: OptimizerConfig) -> float:
    """What optimizer.weight_decay comes to: 0.1 for AdamW and 0 for Adam, where it says nothing."""
    if config.weight_decay is not None:
        return config.weight_decay
    return 0.1 if config.name == "adamw" else 0.0


def decays(config: OptimizerConfig) -> bool:
    """Whether any parameter has a weight decay."""
    return weight_decay(config) != 0 or any(group.weight_decay for group in config.groups)


def check_adam(where: str, section: dict[str, Any], config: OptimizerConfig) -> None:
    """Refuse Adam's weight decay where DeepSpeed steps by an AdamW of its own making.

    where: the DeepSpeed file; section: its zero_optimization, whose keys are DeepSpeed's already.

    Raises:
        UserError: naming the file's key, what it does, and the way out.
    """
    offload = section.get("offload_optimizer") or {}
    if config.name == "adamw" or not decays(config):
        return
    for key, without in (("ratio", 1.0), ("super_offload", False)):
        if offload.get(key, without) != without:
            raise UserError(
                f"{where}: zero_optimization.offload_optimizer.{key} is {offload[key]!r}, with which "
                f"DeepSpeed takes AdamW for a part of the weights, but optimizer.name is {config.name} with "
                f"{_largest_decay(config)}; leave {key} out, or set optimizer.name: adamw"
            )


def _largest_decay(config: OptimizerConfig) -> str:
    if weight_decay(config):
        return f"weight_decay {weight_decay(config):g}"
    return (
        f"a weight_decay of {max(group.weight_decay or 0 for group in config.groups):g} in optimizer.groups"
    )
