"""ZeRO 3 cuts a model while it is built, so that no rank ever holds all of it."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megamoe.compat import deepspeed_zero
from megamoe.config.schema import Precision
from megamoe.parallel.process_groups import ModelParallelUnit

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Partition:
    """Cuts modules over the ranks, as ZeRO 3 does, as soon as their weights are complete.

    Every rank draws the whole weights, from the same seed, so that they do not depend on the layout. It keeps
    its slice of them, in the precision of the model; the fp32 masters are made of that, as without ZeRO 3.
    The experts' weights are cut over the ranks that hold the same experts, by the marks of `mark_expert`.

    filled: the dictionary for `deepspeed.initialize`. precision: of the weights that the model computes with.
    """

    def __init__(self, filled: dict[str, Any], precision: Precision) -> None:
        self._filled, self._dtype = filled, DTYPES[precision]
        self._known: nn.Parameter | None = None

    def __call__(self, module: nn.Module) -> None:
        """Cut the module's parameters, those that are cut already excepted; its buffers stay as they are.

        Collective: all ranks must cut the same modules in the same order.
        """
        whole = []
        for parameter in module.parameters():
            if deepspeed_zero.is_cut(parameter):
                self._known = parameter
            else:
                parameter.data = parameter.data.to(self._dtype)
                whole.append(parameter)
        if not whole:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # notices for the libraries' own developers
            deepspeed_zero.cut(whole, self._filled, ModelParallelUnit(), self._known)
        self._known = whole[0]


@contextmanager
def zero_without_values() -> Iterator[None]:
    """Inside, ZeRO and its optimizers read no values of tensors."""
    with deepspeed_zero.ranks_agree(), deepspeed_zero.host_adam_without_kernel():
        yield


def weights_of(model: nn.Module) -> list[Tensor]:
    """Return what this rank holds of a model's parameters, slices of ZeRO 3 among it, and its buffers."""
    held = [tensor for parameter in model.parameters() for tensor in deepspeed_zero.held_tensors(parameter)]
    return [*held, *model.buffers()]


def num_parameters(model: nn.Module) -> int:
    """Return the number of a model's parameters, as if ZeRO had cut none."""
    return sum(math.prod(deepspeed_zero.whole_shape(parameter)) for parameter in model.parameters())
