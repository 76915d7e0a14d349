"""The gradient noise scale: about the batch size above which a larger one saves few steps.

Source: McCandlish et al. 2018 (An Empirical Model of Large-Batch Training, arXiv 1812.06162), appendix A.1.
The squared norms of gradients of two batch sizes give unbiased estimates of |G|^2 of the true gradient and of
tr(S) of the covariance of one sequence's gradient; the noise scale is their ratio. The sizes here are a micro
batch and the whole batch of a step.
"""

import math
import re
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamoe.compat.deepspeed_zero import whole_shape

EXPERTS, ROUTER = re.compile(r"\.experts\."), re.compile(r"(^|\.)router\.")
DECAY = 0.9  # of the means of both estimates, over the steps that are measured in this launch


def part_of(name: str) -> str:
    """Return the part of the model to which a parameter belongs."""
    return "experts" if EXPERTS.search(name) else "router" if ROUTER.search(name) else "dense"


def estimates(small: float, big: float, small_size: float, big_size: float) -> tuple[float, float]:
    """Return (|G|^2, tr(S)) from the mean squared norms of gradients of two batch sizes."""
    signal = (big_size * big - small_size * small) / (big_size - small_size)
    noise = (small - big) / (1 / small_size - 1 / big_size)
    return signal, noise


class Step(Protocol):
    """What is asked of a step: its micro batches, over all ranks."""

    micro_batches: int


class NoiseScale:
    """Measures the steps that are due; `every` 0: none, and nothing is attached to the parameters.

    named: the trained parameters, the same whole ones on every rank of `group`, whose micro batches form the
    batch. size: sequences of a micro batch. A backward pass must be of one micro batch. device: of the
    gradients. key_of: the metric's name by the part.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        every: int,
        size: int,
        group: dist.ProcessGroup,
        device: torch.device | None = None,
        key_of: Callable[[str], str] = str,
    ) -> None:
        self._every, self._size, self._group, self._device = every, size, group, device
        self._key_of, self._is_due = key_of, False
        self._parts: dict[str, list[nn.Parameter]] = {}
        self._sums: dict[nn.Parameter, Tensor] = {}  # of this rank's micro batches, fp32
        self._squares: dict[str, Tensor] = {}  # of each part, summed over this rank's micro batches, fp64
        self._means: dict[str, tuple[float, float]] = {}
        for name, parameter in named if every else ():
            part = part_of(name)
            self._parts.setdefault(part, []).append(parameter)
            parameter.register_hook(lambda gradient, p=parameter, part=part: self._take(p, part, gradient))

    def begin(self, step: int) -> None:
        """Prepare a step, counted from 1."""
        self._is_due = self._every > 0 and step % self._every == 0
        for part, parameters in self._parts.items() if self._is_due else ():
            self._squares[part] = torch.zeros((), dtype=torch.float64, device=self._device)
            for parameter in parameters:
                self._sums[parameter] = torch.zeros(whole_shape(parameter), device=self._device)

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter, part: str, gradient: Tensor) -> None:
        """Take in the gradient of one micro batch."""
        if self._is_due:
            exact = gradient.float()
            self._sums[parameter] += exact
            self._squares[part] += exact.square().sum(dtype=torch.float64)

    @torch.no_grad()
    def finish(self, record: Step) -> dict[str, float]:
        """Return the noise scale of each part after a step, if it is due; collective then.

        It is infinite where the mean of |G|^2 is not above 0. A step whose gradients are not finite is left
        out. The gradients are shares of the step's: a micro batch's own gradient is its share times their
        number.
        """
        micro_batches = record.micro_batches
        if not self._is_due:
            return {}
        self._is_due = False
        found = []
        for part, parameters in self._parts.items():
            dist.all_reduce(self._squares[part], group=self._group)
            whole = torch.zeros_like(self._squares[part])
            for parameter in parameters:
                total = self._sums.pop(parameter)
                dist.all_reduce(total, group=self._group)
                whole += total.square().sum(dtype=torch.float64)
            found += [self._squares[part] * micro_batches, whole]
        if micro_batches < 2 or not found:
            return {}
        values = torch.stack(found).view(-1, 2).tolist()
        if not all(math.isfinite(value) for pair in values for value in pair):
            return {}  # the means would never be finite again
        scales: dict[str, float] = {}
        for part, (small, big) in zip(self._parts, values, strict=True):
            now = estimates(small, big, self._size, self._size * micro_batches)
            before = self._means.get(part, now)
            self._means[part] = (
                DECAY * before[0] + (1 - DECAY) * now[0],
                DECAY * before[1] + (1 - DECAY) * now[1],
            )
            signal, noise = self._means[part]
            scales[self._key_of(part)] = noise / signal if signal > 0 else float("inf")
        return scales
