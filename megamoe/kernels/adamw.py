"""AdamW and Adam, and the squared norm of the gradients, as passes over all parameters together."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamoe.kernels.library import Library, library_for


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Return the sum of squares over fp32 or bf16 tensors of one device: an fp64 scalar.

    It is not finite if any number is not.
    """
    library = library_for(*tensors) if tensors[0].dtype == torch.float32 else None
    if library is not None:
        return torch.tensor(library.sum_of_squares(tensors), dtype=torch.float64)
    norms = torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors])
    return norms.double().square().sum()


class AdamW(torch.optim.Adam):
    """PyTorch's AdamW or Adam, whose step in fp32 on the CPU is one pass over all tensors together.

    decoupled_weight_decay: True: AdamW, which decays the weight itself (Loshchilov and Hutter 2019). False:
    Adam, which adds L2 regularisation to the gradient, after clipping and before the moments (Kingma and Ba
    2015).
    """

    def __init__(self, params: Any, *, decoupled_weight_decay: bool = True, **options: Any) -> None:
        super().__init__(params, decoupled_weight_decay=decoupled_weight_decay, **options)

    @torch.no_grad()
    def update(self, factor: float, rounded: dict[Tensor, Tensor] | None = None) -> None:
        """Take one step with the gradients times `factor`.

        rounded: by parameter, the bf16 tensor into which its new value is also written.
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
        """Return a group's tensors that have a gradient, and their moments, which the first step makes."""
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
    """The tensors of a parameter group, in the order of torch.optim.Adam._init_group."""

    weights: list[Tensor]
    gradients: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    largest_squares: list[Tensor]
    steps: list[Tensor]

    def passed_over(self) -> list[Tensor]:
        """Return all tensors that a step reads and writes."""
        return self.weights + self.gradients + self.means + self.squares


def _decays(group: dict[str, Any]) -> tuple[float, float]:
    """Return the group's decoupled weight decay and its L2 regularisation; one of them is 0."""
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
