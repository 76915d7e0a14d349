"""Muon: matrices move along their momentum, orthogonalised; AdamW updates everything else.

For a matrix W of R rows and C columns, with gradient G:

    B <- m B + (1 - m) G
    D =  m B + (1 - m) G with Nesterov's momentum, else B
    W <- (1 - lr decay) W - lr scale(R, C) orthogonal(D)

Sources: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon), scale `spectral`; Liu et al. 2025
(Moonlight, arXiv 2502.16982), eq. 4, scale `moonlight`. The arithmetic is that of torch.optim.Muon.

Momentum and update are elementwise, so each rank computes them for the elements that it holds, whichever
these are (`Directions`). Between the two a `Solver` turns the D of all ranks into orthogonal matrices; it
alone knows where the rows of a matrix lie.
"""

import math
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megamoe.compat import replaced
from megamoe.compat.torch_compat import Foreach
from megamoe.config.schema import MuonConfig
from megamoe.kernels.adamw import AdamW
from megamoe.optim.optimizers import MasterWeightAdamW, Stage0AdamW

MOMENTUM = "momentum_buffer"  # in the optimizer's state; torch.optim.Muon's name
Directions = dict[Tensor, Tensor]  # by weight (a flat part of several under ZeRO): D, of the same shape


@dataclass(frozen=True)
class Piece:
    """A rectangle of a matrix in the memory of this rank: rows and columns at an offset in a weight's tensor.

    shape: the whole matrix's rows and columns.
    """

    tensor: Tensor
    offset: int
    sizes: tuple[int, int]
    row_stride: int
    shape: tuple[int, int]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the view of the piece in a contiguous tensor of the weight's shape."""
        return tensor.as_strided(self.sizes, (self.row_stride, 1), tensor.storage_offset() + self.offset)


class Solver(Protocol):
    """Orthogonalises the matrices whose elements the ranks hold. tensors: what Muon updates on this rank."""

    @property
    def tensors(self) -> Container[Tensor]: ...

    def solve(self, directions: Directions) -> Iterator[tuple[Piece, Tensor]]:
        """Yield each piece of a matrix that this rank holds, and the same piece of the orthogonal matrix.

        Collective over the ranks that hold parts of the same matrices.
        """
        ...


def update_scale(config: MuonConfig, rows: int, columns: int) -> float:
    """Return the factor on the learning rate of a matrix."""
    if config.update_scale == "moonlight":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


class Muon:
    """The update of the parameter groups that bear `muon`. solver: set before the first step."""

    def __init__(self, config: MuonConfig) -> None:
        self.config = config
        self.solver: Solver | None = None

    def step(self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], factor: float) -> None:
        """Update the groups' weights, with gradients times `factor`; a weight without one has gradient 0."""
        lr_of: dict[Tensor, float] = {}
        directions: Directions = {}
        for group in groups:
            for weight in group["params"]:
                directions[weight] = self._direction(weight, optimizer.state[weight], factor)
                lr_of[weight] = float(group["lr"])
                weight.mul_(1 - lr_of[weight] * group["weight_decay"])
        if not directions:
            return
        assert self.solver is not None
        for piece, orthogonal in self.solver.solve(directions):
            scale = update_scale(self.config, *piece.shape)
            piece.of(piece.tensor).add_(orthogonal, alpha=-lr_of[piece.tensor] * scale)

    def _direction(self, weight: Tensor, state: dict[str, Any], factor: float) -> Tensor:
        """Take a step of the momentum; return D."""
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        mean, decay = state[MOMENTUM], self.config.momentum
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if factor != 1:
            gradient = gradient * factor
        mean.lerp_(gradient, 1 - decay)
        return gradient.lerp(mean, decay) if self.config.nesterov else mean


def is_of_muon(group: dict[str, Any]) -> bool:
    """Return whether Muon updates a parameter group."""
    return bool(group.get("muon"))


@contextmanager
def _without_matrices(optimizer: torch.optim.Optimizer) -> Iterator[list[dict[str, Any]]]:
    """Context in which the optimizer has AdamW's groups alone; yields those of Muon."""
    groups = optimizer.param_groups
    with replaced(optimizer, param_groups=[group for group in groups if not is_of_muon(group)]):
        yield [group for group in groups if is_of_muon(group)]


def _step(
    optimizer: Any, others: Callable[[], None], factor: float, rounded: Mapping[Tensor, Tensor] | None
) -> None:
    """Take one step, in which `others` updates what Muon does not; see `kernels.adamw.AdamW.step`."""
    with _without_matrices(optimizer) as matrices:
        others()
    optimizer.muon.step(optimizer, matrices, factor)
    weights = [weight for group in matrices for weight in group["params"]]
    if rounded is not None and weights:
        Foreach.copy([rounded[weight] for weight in weights], weights)


class PartitionedMuon(AdamW):
    """Muon for the optimizer that DeepSpeed partitions at ZeRO 1 to 3, with AdamW."""

    def __init__(self, groups: list[dict[str, Any]], config: MuonConfig, **options: Any) -> None:
        self.muon = Muon(config)
        super().__init__(groups, **options)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Any = None, factor: float = 1.0, rounded: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        """See `AdamW.step`."""
        _step(self, partial(super().step, None, factor, rounded), factor, rounded)


class _MuonAtStage0:
    """Changes the update of `Stage0AdamW` or of `MasterWeightAdamW`."""

    def __init__(
        self: Any, groups: list[dict[str, Any]], grad_clip: float, config: MuonConfig, **options: Any
    ) -> None:
        self.muon = Muon(config)
        super().__init__(groups, grad_clip, **options)  # type: ignore[call-arg]

    def update(self: Any, factor: float, rounded: Mapping[Tensor, Tensor] | None = None) -> None:
        """See `AdamW.update`."""
        _step(self, partial(super().update, factor, rounded), factor, rounded)  # type: ignore[misc]


class Stage0Muon(_MuonAtStage0, Stage0AdamW):
    """Muon for ZeRO 0; gradients and clipping are those of `Stage0AdamW`."""


class MasterWeightMuon(_MuonAtStage0, MasterWeightAdamW):
    """Muon for a bf16 model at ZeRO 0; gradients, masters and clipping are those of `MasterWeightAdamW`."""


def moments_of(optimizer: Any, tensor: Tensor, of_adam: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the moments of a tensor that the optimizer steps on; `of_adam`: of Adam."""
    muon: Muon | None = getattr(optimizer, "muon", None)
    is_muon = muon is not None and muon.solver is not None and tensor in muon.solver.tensors
    return (MOMENTUM,) if is_muon else of_adam
