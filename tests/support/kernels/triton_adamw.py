"""Checks of Triton's AdamW in its interpreter, beside PyTorch's; triton_checks.py runs them."""

import itertools
from typing import Any

import torch
from torch import Tensor

from megamoe.kernels.adamw import AdamW
from megamoe.kernels.triton.adamw import BLOCK
from megamoe.optim.short_moments import ShortMoments, rounded_at_random
from tests.support.kernels.drawn import draw
from tests.support.kernels.interpreted import on_triton

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(BLOCK + 3,), (7, 5), (0,)]
STEPS, FACTOR = 5, 0.37


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(draw(*shape, seed=number)) for number, shape in enumerate(SHAPES)]


def groups_of(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.0, "lr": 3e-3}]


def check_steps_of_adamw() -> None:
    """Five steps of AdamW and Adam, to a few roundings; the gradients stay as they are."""
    for decoupled in (True, False):
        ours, theirs = weights(), weights()
        options = {**OPTIONS, "decoupled_weight_decay": decoupled}
        optimizer, oracle = AdamW(groups_of(ours), **options), torch.optim.Adam(groups_of(theirs), **options)
        rounded: dict[Tensor, Tensor] = {each: torch.ones_like(each, dtype=torch.bfloat16) for each in ours}
        for step in range(STEPS):
            for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                gradient = draw(*one.shape, seed=10 * step + number)
                one.grad, other.grad = gradient.clone(), gradient * FACTOR
            with on_triton():
                optimizer.step(factor=FACTOR, rounded=rounded)
            oracle.step()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
            torch.testing.assert_close(rounded[one].float(), one.detach(), rtol=2**-7, atol=0)
            assert one.grad is not None and float(optimizer.state[one]["step"]) == STEPS
            for name in ("exp_avg", "exp_avg_sq"):
                found, expected = optimizer.state[one][name], oracle.state[other][name]
                torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-8)
        assert torch.equal(ours[0].grad, draw(*SHAPES[0], seed=10 * (STEPS - 1)))  # type: ignore[arg-type]


def check_moments_in_bf16() -> None:
    """Each is what `rounded_at_random` makes of the kernel's own fp32 ones; gradients may be bf16 too."""
    from megamoe.kernels.triton.adamw import adamw

    numbers = torch.tensor([1.0, 1e-2, 0.1, 1e-3, -0.10536, -1.0005e-3, 1e-8, 0.1, 0.0])
    for number, of_gradient in itertools.product((1.0, 2.0, 40.0), (torch.float32, torch.bfloat16)):
        weight, gradient = draw(BLOCK + 5), draw(BLOCK + 5, seed=1).to(of_gradient)
        moments = draw(BLOCK + 5, seed=2).bfloat16(), draw(BLOCK + 5, seed=3).abs().bfloat16()
        wide, step = (moments[0].float(), moments[1].float()), torch.tensor(number)
        other = weight.clone()
        adamw(weight, gradient, *moments, None, numbers, step)
        adamw(other, gradient, *wide, None, numbers, step)
        assert torch.equal(weight, other)
        for key, (moment, exact) in enumerate(zip(moments, wide, strict=True), 2 * int(number)):
            expected = rounded_at_random(exact, torch.tensor(key, dtype=torch.int32))
            assert torch.equal(moment, expected), (number, of_gradient)


def check_steps_with_moments_in_bf16() -> None:
    """The optimizer of `optimizer.moments: bf16` steps by the kernel, as it does without it."""
    found = []
    for by_triton in (True, False):
        ours = weights()
        optimizer = ShortMoments(groups_of(ours), fused=True, **OPTIONS)
        for step in range(STEPS):
            for number, each in enumerate(ours):
                each.grad = draw(*each.shape, seed=10 * step + number)
            if by_triton:
                with on_triton():
                    optimizer.step()
            else:
                optimizer.step()
        assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}
        found.append(ours)
    for one, other in zip(*found, strict=True):
        # A rounding of the fp32 moments may decide which of two neighbours the draw takes.
        torch.testing.assert_close(one, other, rtol=0, atol=STEPS * OPTIONS["lr"] * 2**-7)
