"""AdamW or Adam for ZeRO 1 to 3: PyTorch's fused version, or NVIDIA Apex's if installed."""

import importlib.util
from typing import Any

import torch

from megamoe.config.schema import OptimizerConfig
from megamoe.errors import UserError


def weight_decay(config: OptimizerConfig) -> float:
    """Return optimizer.weight_decay, or its default: 0.1 for AdamW and 0 for Adam."""
    if config.weight_decay is not None:
        return config.weight_decay
    return 0.1 if config.name == "adamw" else 0.0


def decays(config: OptimizerConfig) -> bool:
    """Whether any parameter has a weight decay."""
    return weight_decay(config) != 0 or any(group.weight_decay for group in config.groups)


def uses_apex(config: OptimizerConfig, stage: int, offload: bool) -> bool:
    """Whether optimizer.kernel selects Apex. ZeRO 0 uses our optimiser, and offload uses DeepSpeed's."""
    if config.kernel == "auto":
        return stage > 0 and not offload and not apex_problem()
    return config.kernel == "apex"


def check_kernel(config: OptimizerConfig, stage: int, offload: bool) -> None:
    """Refuse Apex if it cannot be used.

    Raises:
        UserError: naming the key, the reason, and the way out.
    """
    if config.kernel != "apex":
        return
    problem = apex_problem()
    if stage == 0:
        problem = "ZeRO 0 steps by an optimiser of its own"
    elif offload:
        problem = "the DeepSpeed file moves the optimiser to the CPU"
    if problem:
        raise UserError(f"optimizer.kernel: found apex, but {problem}; set optimizer.kernel: auto")


def check_adam(where: str, section: dict[str, Any], config: OptimizerConfig) -> None:
    """Refuse Adam with weight decay if DeepSpeed would replace it with its own AdamW.

    where: the DeepSpeed file. section: its zero_optimization, whose keys are already checked.

    Raises:
        UserError: naming the file's key, its effect, and the way out.
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


def apex_problem() -> str:
    """Return why Apex's optimiser cannot be used here, or an empty string. PyPI's `apex` is another
    package.
    """
    try:
        found = all(importlib.util.find_spec(name) for name in ("apex.optimizers", "amp_C"))
    except (ImportError, OSError, RuntimeError, SyntaxError, ValueError):
        found = False
    if not found:
        return "NVIDIA's Apex with its compiled optimisers is not installed"
    return "" if has_cuda() else "NVIDIA's Apex is installed, but there is no CUDA device"


def has_cuda() -> bool:
    """Whether PyTorch sees a CUDA device."""
    return torch.cuda.is_available()


def zero_adamw(
    config: OptimizerConfig, groups: list[dict[str, Any]], options: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return the optimiser that DeepSpeed partitions; options: from `adamw_options`."""
    if not uses_apex(config, stage=1, offload=False):
        kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
        return kind(groups, **options)
    apex_options = {name: value for name, value in options.items() if name != "fused"}
    return _apex_adamw(groups, {**apex_options, "adam_w_mode": config.name == "adamw"})


def _apex_adamw(groups: list[dict[str, Any]], options: dict[str, Any]) -> torch.optim.Optimizer:
    """Return Apex's FusedAdam with the state layout of torch.optim.AdamW.

    Apex stores a group's step count in the group only, which a checkpoint of tensors would lose.
    """
    from apex.optimizers import FusedAdam

    class ApexAdamW(FusedAdam):
        def step(self, *args: Any, **kwargs: Any) -> None:
            """Update all groups; the step count comes from each parameter's state."""
            for group in self.param_groups:
                states = [self.state.get(parameter, {}) for parameter in group["params"]]
                group["step"] = max((int(state["step"]) for state in states if "step" in state), default=0)
            super().step(*args, **kwargs)
            for group in self.param_groups:
                for state in (self.state.get(parameter) for parameter in group["params"]):
                    if state:
                        state["step"] = torch.tensor(float(group["step"]))

    optimizer: torch.optim.Optimizer = ApexAdamW(groups, **options)
    return optimizer
