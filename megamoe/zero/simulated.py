"""What a simulation on tensors without values needs of ZeRO."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from megamoe.compat.deepspeed_zero import held_tensors, host_adam_without_kernel, ranks_agree, whole_shape


@contextmanager
def zero_without_values() -> Iterator[None]:
    """Inside, ZeRO and its optimizers read no values of tensors."""
    with ranks_agree(), host_adam_without_kernel():
        yield


def weights_of(model: nn.Module) -> list[Tensor]:
    """Return what this rank holds of a model's parameters, slices of ZeRO 3 among it, and its buffers."""
    held = [tensor for parameter in model.parameters() for tensor in held_tensors(parameter)]
    return [*held, *model.buffers()]


def num_parameters(model: nn.Module) -> int:
    """Return the number of a model's parameters, as if ZeRO had cut none."""
    return sum(math.prod(whole_shape(parameter)) for parameter in model.parameters())
