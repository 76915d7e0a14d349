"""The optimiser's passes over all parameters: the gradient's norm, and the update with the clipping."""

from typing import Any

import torch
from torch import Tensor

from megamoe.compat.torch_compat import AdamState, add_to_all, scale_all
from megamoe.kernels.library import Library, library_for


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Of all numbers of fp32 or bf16 tensors on one device: fp64 scalar; not finite where one is not."""
    library = library_for(*tensors) if tensors[0].dtype == torch.float32 else None
    if library is not None:
        return torch.tensor(library.sum_of_squares(tensors), dtype=torch.float64)
    norms = torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors])
    return norms.double().square().sum()


class AdamW(torch.optim.Adam):
    """PyTorch's AdamW, or its Adam; on the CPU, in fp32, its step is one pass over all tensors together.

    decoupled_weight_decay: AdamW's, apart from the gradient (Loshchilov and Hutter 2019); False: Adam's, L2
    regularisation, added to the gradient after the clipping and before the moments (Kingma and Ba 2015).
    """

    def __init__(self, params: Any, *, decoupled_weight_decay: bool = True, **options: Any) -> None:
        super().__init__(params, decoupled_weight_decay=decoupled_weight_decay, **options)

    @torch.no_grad()
    def update(self, factor: float, rounded: dict[Tensor, Tensor] | None = None) -> None:
        """One step by `factor` times the gradients.

        rounded: by parameter, where its value is written in bf16.
        """
        groups = [(group, AdamState.of(self, group)) for group in self.param_groups]
        weights = [weight for _, state in groups for weight in state.weights]
        tensors = [tensor for _, state in groups for tensor in state.passed_over()]
        library = library_for(*tensors) if tensors and tensors[0].dtype == torch.float32 else None
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
        if factor != 1 and gradients:
            scale_all(gradients, factor)
        torch.optim.Adam.step(self)
        for parameter in parameters if rounded is not None else ():
            assert rounded is not None
            rounded[parameter].copy_(parameter)


def _decays(group: dict[str, Any]) -> tuple[float, float]:
    """Of the weight itself, and into the gradient."""
    decay = float(group["weight_decay"])
    return (decay, 0.0) if group["decoupled_weight_decay"] else (0.0, decay)


def _update(
    library: Library,
    state: AdamState,
    group: dict[str, Any],
    factor: float,
    rounded: dict[Tensor, Tensor] | None,
) -> None:
    add_to_all(state.steps, 1.0)
    counts = [float(step) for step in state.steps]
    library.adamw(
        [state.weights, state.gradients, state.means, state.squares],
        None if rounded is None else [rounded[weight] for weight in state.weights],
        [[1 - beta**count for count in counts] for beta in group["betas"]],
        [factor, float(group["lr"]), *group["betas"], group["eps"], *_decays(group)],
    )
