"""AdamW and Adam with moments in bf16: 4 bytes of a parameter in place of 8.

A moment is kept as bf16 and updated in fp32. With the nearest bf16, a change below 2^-9 of the moment would
be lost, as (1 - beta2) g^2 is at beta2 = 0.999: the moment would stand still. So it is rounded up or down at
random, in proportion to the distance, and is right on average. The random bits are a hash of the number to be
rounded and of the step. They need no generator and do not depend on the place of an element in a rank's part,
so every layout rounds alike. On CUDA Triton does it in the pass of the update. Without it each chunk takes
some 50 operators.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from megamoe.compat.torch_compat import AdamState
from megamoe.kernels.adamw import AdamW

CHUNK = 1 << 24  # elements whose moments are in fp32 at a time: 128 MiB
MEAN, SQUARE = 0, 1  # the moments, in the hash
KEPT_BITS = -65536  # of a number in fp32: those that bf16 has


class ShortMoments(AdamW):
    """AdamW or Adam whose moments are bf16; parameters and gradients are fp32."""

    moment_dtype = torch.bfloat16

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Any = None, factor: float = 1.0, rounded: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        """See `AdamW.step`; the moments are made before PyTorch would make them in fp32."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter]["step"] = torch.zeros((), device=parameter.device)
                    for name in ("exp_avg", "exp_avg_sq"):
                        self.state[parameter][name] = torch.zeros_like(parameter, dtype=self.moment_dtype)
        super().step(closure, factor, rounded)

    def step_by_pytorch(self) -> None:
        """Take one step in chunks, whose moments are in fp32."""
        for group in self.param_groups:
            state = AdamState.of(self, group)
            of_tensors = (state.weights, state.gradients, state.means, state.squares)
            for step, *tensors in zip(state.steps, *of_tensors, strict=True):
                for chunk in zip(*(tensor.view(-1).split(CHUNK) for tensor in tensors), strict=True):
                    _update(group, step, *chunk)
                step += 1


def _update(
    group: dict[str, Any], step: Tensor, weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor
) -> None:
    """Update a chunk. step: the number of the steps before."""
    count, wide = step.clone(), [mean.float(), square.float()]
    (adamw if group["decoupled_weight_decay"] else adam)(
        [weight],
        [gradient],
        [wide[MEAN]],
        [wide[SQUARE]],
        [],
        [count],  # the function counts
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
        fused=group["fused"],
    )
    for number, short in ((MEAN, mean), (SQUARE, square)):
        short.copy_(rounded_at_random(wide[number], 2 * count.to(torch.int32) + number))


def rounded_at_random(values: Tensor, key: Tensor) -> Tensor:
    """Return fp32 values as bf16, each one of its two neighbours, the nearer with the larger probability.

    key: int32 scalar, of the draw. 0 stays 0, and what is not finite stays so.
    """
    bits = values.view(torch.int32)
    draw = _mixed(bits ^ (key * -1640531527)) & 0xFFFF
    rounded = ((bits + draw) & KEPT_BITS).view(torch.float32)
    # A draw can overflow the bits of a NaN.
    return torch.where(values.isfinite(), rounded, values).bfloat16()


def _mixed(bits: Tensor) -> Tensor:
    """Return a hash of each number, int32; `lowbias32` of Chris Wellons' hash-prospector."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        bits = (bits ^ (bits >> shift)) * factor
    return bits ^ (bits >> 16)
