"""DeepSpeed's ZeRO 1 and 2 under pipeline stages: gradients that wait for their reduction, and the norm."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from megamoe.compat import replaced

Norm = Callable[[Iterable[tuple[nn.Parameter, Tensor]], bool], Tensor]


def accumulated_gradient(optimizer: Any, parameter: nn.Parameter) -> Tensor:
    """Return where ZeRO accumulates a parameter's gradient until the end of the step.

    Reason: each of DeepSpeed's optimizers has a place of its own for it, and no function for all.
    Seen with: DeepSpeed 0.19.8.
    Without it: a tied embedding gets the gradient of one stage only, and the two copies drift apart.
    Canary: test_deepspeed_pipeline.py::test_places_of_gradients
    """
    if hasattr(optimizer, "master_of"):  # ours, at ZeRO 0
        gradient = optimizer.master_of(parameter).grad
    elif isinstance(optimizer, BF16_Optimizer):
        gradient = parameter._hp_grad  # type: ignore[attr-defined]
    else:
        gradient = optimizer.get_param_gradient_attribute(parameter)
    assert isinstance(gradient, Tensor)
    return gradient


def reduce_on_request(engine: Any) -> None:
    """Let the engine reduce gradients only where `allreduce_gradients` is called; not for ZeRO 2 and 3.

    Reason: it reduces them in the last backward pass, before a pipeline stage has sent what that pass made.
    Seen with: DeepSpeed 0.19.8.
    Without it: the stages wait for each other for ever.
    Canary: test_deepspeed_pipeline.py::test_reduction_in_the_last_backward_pass
    """
    engine.enable_backward_allreduce = False


def replace_norm(optimizer: Any, norm: Norm) -> None:
    """Let ZeRO 1 or 2 clip by `norm`, which gets pairs (parameter, gradient) and whether these are cut.

    Reason: DeepSpeed sums the norm of each parameter group in collectives of its own, also over the stages.
    Seen with: DeepSpeed 0.19.8.
    Without it: stages with different parameter groups, such as one without experts, wait for each other
        for ever.
    Canary: test_deepspeed_pipeline.py::test_norm_of_each_group
    """
    if isinstance(optimizer, BF16_Optimizer):
        step = optimizer.step

        def stepped(*args: Any, **kwargs: Any) -> Any:
            found = float(norm(_gradients_in_bf16(optimizer), False))
            answer = found if found == found and found != float("inf") else -1.0
            names = ("get_global_norm_of_tensors", "get_norm_with_moe_layers")
            with replaced(bf16_optimizer, **dict.fromkeys(names, lambda *unused, **also_unused: answer)):
                return step(*args, **kwargs)

        optimizer.step = stepped
    else:
        optimizer.scaled_global_norm = lambda norm_type=2: norm(_partitioned_gradients(optimizer), True)


def _gradients_in_bf16(optimizer: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    for number, parameters in enumerate(optimizer.bf16_groups):
        for place, parameter in enumerate(parameters):
            if optimizer.fp32_groups_has_gradients[number][place]:
                yield parameter, optimizer.fp32_groups_gradients[number][place]


def _partitioned_gradients(optimizer: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    for number in range(len(optimizer.bit16_groups)):
        gradients = (
            g for g in optimizer.averaged_gradients[number] if not getattr(g, "_zero_padding", False)
        )
        yield from zip(optimizer.params_in_partition[number], gradients, strict=False)
