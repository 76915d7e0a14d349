"""AdamW and Adam, and the squared norm of the gradients, as passes over all parameters together."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megamoe.compat.torch_compat import AdamState, Foreach
from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.kernels.library import Library


def sum_of_squares(tensors: list[Tensor], kernels: Kernels) -> Tensor:
    """Return the sum of squares over fp32 or bf16 tensors of one device: an fp64 scalar.

    It is not finite if any number is not.
    """
    library = kernels.library_for(*tensors) if tensors[0].dtype == torch.float32 else None
    if library is not None:
        return torch.tensor(library.sum_of_squares(tensors), dtype=torch.float64)
    return torch.stack(Foreach.norms(tensors)).double().square().sum()


class AdamW(torch.optim.Adam):
    """PyTorch's AdamW or Adam, whose step on CUDA is one pass over each tensor, by Triton.

    decoupled_weight_decay: True: AdamW, which decays the weight itself (Loshchilov and Hutter 2019). False:
    Adam, which adds L2 regularisation to the gradient, after clipping and before the moments (Kingma and Ba
    2015).
    """

    def __init__(
        self,
        params: Any,
        *,
        kernels: Kernels = DEFAULT_KERNELS,
        decoupled_weight_decay: bool = True,
        **options: Any,
    ) -> None:
        self.kernels = kernels
        super().__init__(params, decoupled_weight_decay=decoupled_weight_decay, **options)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Any = None, factor: float = 1.0, rounded: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        """Take one step with the gradients times `factor`, by Triton or PyTorch, which scales them in place.

        rounded: by parameter, the tensor into which its new value is also written, in bf16.
        """
        weights = [weight for group in self.param_groups for weight in group["params"]]
        weights = [weight for weight in weights if weight.grad is not None]
        if weights and self.kernels.uses_triton(weights[0].device):
            self._step_by_triton(factor, rounded or {})
            return
        if factor != 1 and weights:
            Foreach.scale([weight.grad for weight in weights], factor)
        self.step_by_pytorch()
        if rounded is not None and weights:
            Foreach.copy([rounded[weight] for weight in weights], weights)

    def step_by_pytorch(self) -> None:
        """Take one step by PyTorch's operators."""
        torch.optim.Adam.step(self)

    @torch.no_grad()
    def update(self, factor: float, rounded: Mapping[Tensor, Tensor] | None = None) -> None:
        """Do what `step` does; in fp32 on the CPU in one pass over all tensors together."""
        groups = [(group, AdamState.of(self, group)) for group in self.param_groups]
        tensors = [tensor for _, state in groups for tensor in state.passed_over()]
        fp32 = bool(tensors) and tensors[0].dtype == torch.float32
        library = self.kernels.library_for(*tensors) if fp32 else None
        if library is None:
            AdamW.step(self, factor=factor, rounded=rounded)
            return
        for group, state in groups:
            if state.weights:
                _update(library, state, group, factor, rounded)

    def _step_by_triton(self, factor: float, rounded: Mapping[Tensor, Tensor]) -> None:
        from megamoe.kernels.triton.adamw import adamw

        groups = [(group, AdamState.of(self, group)) for group in self.param_groups]
        Foreach.add([step for _, state in groups for step in state.steps], 1.0)
        numbers = torch.tensor([_numbers(group, factor) for group, _ in groups], dtype=torch.float32)
        device = next(weight.device for _, state in groups for weight in state.weights)
        if device.type == "cuda":
            numbers = numbers.pin_memory().to(device, non_blocking=True)
        for of_group, (_, state) in zip(numbers, groups, strict=True):
            moments = zip(state.means, state.squares, strict=True)
            for weight, gradient, both, step in zip(
                state.weights, state.gradients, moments, state.steps, strict=True
            ):
                adamw(weight, gradient, *both, rounded.get(weight), of_group, step)


def _numbers(group: dict[str, Any], factor: float) -> list[float]:
    """Return what the Triton kernel reads from the device: a CUDA graph could be replayed with others."""
    betas = group["betas"]
    moments = [*(1 - beta for beta in betas), *(math.log(beta) if beta else -math.inf for beta in betas)]
    return [factor, float(group["lr"]), *moments, group["eps"], *_decays(group)]


def _decays(group: dict[str, Any]) -> tuple[float, float]:
    """Return the group's decoupled weight decay and its L2 regularisation; one of them is 0."""
    decay = float(group["weight_decay"])
    return (decay, 0.0) if group["decoupled_weight_decay"] else (0.0, decay)


def _update(
    library: Library,
    state: AdamState,
    group: dict[str, Any],
    factor: float,
    rounded: Mapping[Tensor, Tensor] | None,
) -> None:
    Foreach.add(state.steps, 1.0)
    counts = [float(step) for step in state.steps]
    library.adamw(
        [state.weights, state.gradients, state.means, state.squares],
        None if rounded is None else [rounded[weight] for weight in state.weights],
        [[1 - beta**count for count in counts] for beta in group["betas"]],
        [factor, float(group["lr"]), *group["betas"], group["eps"], *_decays(group)],
    )
