"""DeepSpeed's ZeRO 1 in bf16: its gradients, whose reduction and update others may take over."""

from collections.abc import Callable
from typing import Any, Protocol

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import nn


class _GradientOwner(Protocol):
    """Takes the gradients of ZeRO 1 in bf16 from autograd to the update."""

    def take(self, parameter: nn.Parameter, group: int, place: int) -> None: ...

    def reduce(self) -> None: ...

    def step(self) -> None: ...

    def clear(self) -> None: ...


def is_zero1_in_bf16(optimizer: Any) -> bool:
    """Return whether the engine's optimiser is DeepSpeed's with fp32 gradients of a bf16 model.

    Reason: DeepSpeed chooses it by stage, dtype and settings, without a public name for the choice.
    Seen with: DeepSpeed 0.19.8.
    Without it: the others, whose gradients are elsewhere, would be taken for it.
    Canary: test_deepspeed_zero.py::test_gradients_have_an_owner
    """
    return isinstance(optimizer, BF16_Optimizer) and bool(optimizer.immediate_grad_update)


def give_gradients_to(owner: _GradientOwner, engine: Any) -> None:
    """Let `owner` accumulate, reduce, apply and clear the gradients of the engine's optimiser.

    take: called for each parameter as soon as autograd has its gradient. reduce: called by the backward pass
    of a step's last micro batch. step, clear: in the place of the optimiser's.

    Reason: the optimiser accumulates by two kernels, copies all gradients together, sums all of them on every
        rank, and computes norm, clipping and zeros on all of them, though a rank needs only its own part.
    Seen with: DeepSpeed 0.19.8.
    Without it: of a model of 0.9 B parameters on 8 H100, by the roofline, 35 ms a step and not 12.
    Canary: test_deepspeed_zero.py::test_gradients_have_an_owner
    """
    optimizer = engine.optimizer

    def take(parameter: nn.Parameter, group: int, place: int, clear_lp_grads: bool) -> None:
        if parameter.grad is not None:
            owner.take(parameter, group, place)

    optimizer._update_hp_grad = take
    optimizer.clear_hp_grads = owner.clear
    optimizer.step = owner.step
    engine.buffered_allreduce_fallback = lambda *unused, **also_unused: owner.reduce()


def finish_step(optimizer: Any, norm: float, updates: Callable[[], None] | None) -> None:
    """Do what ZeRO 1 in bf16 does around an update: set the norm, link the moments, spread the new weights.

    updates: moves masters and moments; None: the norm is not finite, and nothing moves.

    Reason: the norm and the flag of a step that was skipped are attributes of the optimiser, and it finds
        moments by a function that begins with an underscore.
    Seen with: DeepSpeed 0.19.8.
    Without it: the engine reports no norm, and moments cannot be saved.
    Canary: test_deepspeed_zero.py::test_gradients_have_an_owner
    """
    optimizer.overflow = updates is None
    optimizer._global_grad_norm = float("inf") if updates is None else norm
    if updates is None:
        optimizer.clear_lp_grads()
        return
    updates()
    optimizer._lazy_init_hp_params_optimizer_state()
    optimizer.update_lp_params()


def parameters_of_groups(optimizer: Any) -> list[list[nn.Parameter]]:
    """Return the model's parameters by group, in the order of the flat tensors.

    Reason: the attribute has no documentation.
    Seen with: DeepSpeed 0.19.8.
    Without it: gradients would be reduced to the wrong parts.
    Canary: test_deepspeed_zero.py::test_gradients_have_an_owner
    """
    groups: list[list[nn.Parameter]] = optimizer.bf16_groups
    return groups
