"""AdamW and Adam with moments in bf16: 4 bytes of a parameter in place of 8.

A moment is kept as bf16 and updated in fp32. With the nearest bf16, a change below 2^-9 of the moment would
be lost, as (1 - beta2) g^2 is at beta2 = 0.999: the moment would stand still. So it is rounded up or down at
random, in proportion to the distance, and is right on average. The random bits are a hash of the number to be
rounded and of the step. They need no generator and do not depend on the place of an element in a rank's part,
so every layout rounds alike. There is no fused kernel: each chunk takes some 50 operators, where fused Adam
takes one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

CHUNK = 1 << 24  # elements whose moments are in fp32 at a time: 128 MiB
MEAN, SQUARE = 0, 1  # the moments, in the hash
KEPT_BITS = -65536  # of a number in fp32: those that bf16 has


class _ShortMoments(torch.optim.Adam):
    """`torch.optim.Adam` whose moments are bf16; parameters and gradients are fp32."""

    moment_dtype = torch.bfloat16

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; `grad_scale`, if it is set, divides the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = torch.zeros_like(parameter, dtype=self.moment_dtype)
                self._update(group, parameter, state)

    def _update(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Tensor]) -> None:
        flat = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        step = state["step"] + 1
        for weight, gradient, mean, square in zip(
            *(each.view(-1).split(CHUNK) for each in flat if each is not None), strict=True
        ):
            wide = [mean.float(), square.float()]
            (adamw if group["decoupled_weight_decay"] else adam)(
                [weight],
                [gradient],
                [wide[MEAN]],
                [wide[SQUARE]],
                [],
                [state["step"].clone()],  # the function counts
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                fused=group["fused"],
                grad_scale=getattr(self, "grad_scale", None),
            )
            for number, short in ((MEAN, mean), (SQUARE, square)):
                short.copy_(rounded_at_random(wide[number], 2 * step.to(torch.int32) + number))
        state["step"].copy_(step)


class ShortMomentsAdam(_ShortMoments):
    """Adam, with L2 regularisation added to the gradient."""


class ShortMomentsAdamW(_ShortMoments, torch.optim.AdamW):
    """AdamW, with decoupled weight decay."""


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
