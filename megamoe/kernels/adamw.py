"""AdamW and Adam, and the squared norm of the gradients, as passes over all parameters together."""

from typing import Any

import torch
from torch import Tensor

from megamoe.compat.torch_compat import AdamState, Foreach, step_with_scaled_gradients
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
    """PyTorch's AdamW or Adam, whose step in fp32 on the CPU is one pass over all tensors together.

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
    def update(self, factor: float, rounded: dict[Tensor, Tensor] | None = None) -> None:
        """Take one step with the gradients times `factor`.

        rounded: by parameter, the bf16 tensor into which its new value is also written.
        """
        groups = [(group, AdamState.of(self, group)) for group in self.param_groups]
        weights = [weight for _, state in groups for weight in state.weights]
        tensors = [tensor for _, state in groups for tensor in state.passed_over()]
        fp32 = bool(tensors) and tensors[0].dtype == torch.float32
        library = self.kernels.library_for(*tensors) if fp32 else None
        if library is None:
            self._update_plainly(weights, factor, rounded)
            return
        for group, state in groups:
            if state.weights:
                _update(library, state, group, factor, rounded)

    def _update_plainly(
        self, parameters: list[Tensor], factor: float, rounded: dict[Tensor, Tensor] | None
    ) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        if factor != 1 and gradients and gradients[0].device.type == "cuda" and self.defaults["fused"]:
            step_with_scaled_gradients(self, factor, gradients[0].device)
        else:
            if factor != 1 and gradients:
                Foreach.scale(gradients, factor)
            torch.optim.Adam.step(self)
        if rounded is not None and parameters:
            Foreach.copy([rounded[parameter] for parameter in parameters], parameters)


def _decays(group: dict[str, Any]) -> tuple[float, float]:
    """Return the group's decoupled weight decay and its L2 regularisation; one of them is 0."""
    decay = float(group["weight_decay"])
    return (decay, 0.0) if group["decoupled_weight_decay"] else (0.0, decay)


def _update(
    library: Library,
    state: AdamState,
    group: dict[str, Any],
    factor: float,
    rounded: dict[Tensor, Tensor] | None,
) -> None:
    Foreach.add(state.steps, 1.0)
    counts = [float(step) for step in state.steps]
    library.adamw(
        [state.weights, state.gradients, state.means, state.squares],
        None if rounded is None else [rounded[weight] for weight in state.weights],
        [[1 - beta**count for count in counts] for beta in group["betas"]],
        [factor, float(group["lr"]), *group["betas"], group["eps"], *_decays(group)],
    )
