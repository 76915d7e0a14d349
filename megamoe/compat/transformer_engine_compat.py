"""Transformer Engine: its version, what FP8 a device can do, and a GroupedLinear without weights of its own.

Imported only where a run may use it; its modules are imported within the functions.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

OLDEST = "2.3"  # has every scaling of model.fp8
# How Transformer Engine is asked whether the device can do it.
FP8_ABILITY = {
    "delayed": "is_fp8_available",
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}


def is_too_old(version: str) -> bool:
    """Return whether a version of Transformer Engine is older than `OLDEST`; by its first two numbers.

    Reason: its versions end in a commit, such as 2.3.0+5bee81e, and a container's may be no version at all.
    Seen with: Transformer Engine 2.3 by its documentation, 2.20.2.
    Without it: an old one fails when the model is built, by a missing attribute.
    Canary: test_transformer_engine.py::test_versions
    """
    return _numbers(version) < _numbers(OLDEST)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def fp8_ability(fp8: str) -> tuple[bool, str]:
    """Return whether this device can do a scaling of model.fp8, and why not.

    Reason: FP8GlobalStateManager is Transformer Engine's own bookkeeping; 2.3 has no public question for
        every scaling.
    Seen with: Transformer Engine 2.20.2 on an H100; the tests run on a stand-in.
    Without it: a device that cannot fails in the first step.
    Canary: test_transformer_engine.py::test_fp8_questions
    """
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    return getattr(FP8GlobalStateManager, FP8_ABILITY[fp8])()


class LentWeights:
    """A GroupedLinear whose weights are lent to it for each call.

    linear: without bias. Its parameters are dropped.

    Reason: it owns a parameter for each expert; ours are one stacked parameter, of which these are views.
    Seen with: Transformer Engine 2.20.2 on an H100; the tests run on a stand-in.
    Without it: names, ZeRO's partitions, expert parallelism and checkpoints would differ between backends.
    Canary: test_transformer_engine.py::test_weights_can_be_lent
    """

    def __init__(self, linear: nn.Module, num_experts: int) -> None:
        self.linear = linear
        self.names = [f"weight{number}" for number in range(num_experts)]
        for name in self.names:
            delattr(linear, name)

    @contextmanager
    def lent(self, weights: Sequence[Tensor]) -> Iterator[Any]:
        """Inside, the module computes with these."""
        # Past nn.Module, which would take a leaf for a buffer or parameter of its own.
        held = self.linear.__dict__
        held.update(zip(self.names, weights, strict=True))
        try:
            yield self.linear
        finally:
            for name in self.names:
                del held[name]
