"""AdamW of ZeRO 1 and 2: PyTorch's fused one, or NVIDIA Apex's where it is installed."""

import importlib.util
from typing import Any

import torch

from megamoe.config.schema import OptimizerConfig
from megamoe.errors import UserError


def uses_apex(config: OptimizerConfig, stage: int, offload: bool) -> bool:
    """What optimizer.kernel comes to. ZeRO 0 has an optimiser of ours, an offloaded one is DeepSpeed's."""
    if config.kernel == "auto":
        return stage > 0 and not offload and not apex_problem()
    return config.kernel == "apex"


def check_kernel(config: OptimizerConfig, stage: int, offload: bool) -> None:
    """Refuse Apex where it is not.

    Raises:
        UserError: naming the key, why not, and the way out.
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


def apex_problem() -> str:
    """Why Apex's optimiser cannot be used here; empty where it can. PyPI's `apex` is another package."""
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
    """What DeepSpeed partitions; options: of `adamw_options`."""
    if not uses_apex(config, stage=1, offload=False):
        return torch.optim.AdamW(groups, **options)
    return _apex_adamw(groups, {name: value for name, value in options.items() if name != "fused"})


def _apex_adamw(groups: list[dict[str, Any]], options: dict[str, Any]) -> torch.optim.Optimizer:
    """Apex's FusedAdam, whose state is named and placed as that of torch.optim.AdamW.

    Apex counts a group's steps in the group alone, which a checkpoint of tensors would lose.
    """
    from apex.optimizers import FusedAdam

    class ApexAdamW(FusedAdam):
        def step(self, *args: Any, **kwargs: Any) -> None:
            """One step of all groups, counted from what each parameter's state says."""
            for group in self.param_groups:
                states = [self.state.get(parameter, {}) for parameter in group["params"]]
                group["step"] = max((int(state["step"]) for state in states if "step" in state), default=0)
            super().step(*args, **kwargs)
            for group in self.param_groups:
                for state in (self.state.get(parameter) for parameter in group["params"]):
                    if state:
                        state["step"] = torch.tensor(float(group["step"]))

    optimizer: torch.optim.Optimizer = ApexAdamW(groups, adam_w_mode=True, **options)
    return optimizer
