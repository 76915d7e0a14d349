"""The optimiser's passes over all parameters: the gradient's norm, and the update with the clipping."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
        groups = [(group, self._columns(group)) for group in self.param_groups]
        weights = [weight for _, columns in groups for weight in columns.weights]
        tensors = [tensor for _, columns in groups for tensor in columns.passed_over()]
        library = library_for(*tensors) if tensors and tensors[0].dtype == torch.float32 else None
        if library is None:
            self._update_plainly(weights, factor, rounded)
            return
        for group, columns in groups:
            if columns.weights:
                _update(library, columns, group, factor, rounded)

    def _columns(self, group: dict[str, Any]) -> "_Columns":
        """A group's tensors that have a gradient, and their moments, which the first step makes."""
        columns = _Columns([], [], [], [], [], [])
        self._init_group(group, *vars(columns).values())
        return columns

    def _update_plainly(
        self, parameters: list[Tensor], factor: float, rounded: dict[Tensor, Tensor] | None
    ) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        if factor != 1 and gradients:
            torch._foreach_mul_(gradients, factor)
        torch.optim.Adam.step(self)
        for parameter in parameters if rounded is not None else ():
            assert rounded is not None
            rounded[parameter].copy_(parameter)


@dataclass
class _Columns:
    """In the order of torch.optim.Adam._init_group."""

    weights: list[Tensor]
    gradients: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    largest_squares: list[Tensor]
    steps: list[Tensor]

    def passed_over(self) -> list[Tensor]:
        """All that a step reads and writes."""
        return self.weights + self.gradients + self.means + self.squares


def _decays(group: dict[str, Any]) -> tuple[float, float]:
    """Of the weight itself, and into the gradient."""
    decay = float(group["weight_decay"])
    return (decay, 0.0) if group["decoupled_weight_decay"] else (0.0, decay)


def _update(
    library: Library,
    columns: _Columns,
    group: dict[str, Any],
    factor: float,
    rounded: dict[Tensor, Tensor] | None,
) -> None:
    torch._foreach_add_(columns.steps, 1.0)
    counts = [float(step) for step in columns.steps]
    library.adamw(
        [columns.weights, columns.gradients, columns.means, columns.squares],
        None if rounded is None else [rounded[weight] for weight in columns.weights],
        [[1 - beta**count for count in counts] for beta in group["betas"]],
        [factor, float(group["lr"]), *group["betas"], group["eps"], *_decays(group)],
    )
