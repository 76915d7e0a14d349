"""How a step's forward and backward pass divide over attention and FFNs, by hooks on a model of ours.

The backward pass of a module lasts from the gradient of its output to that of its input. A router gives no
tensor but a Routing, and rows are moved by no module: their backward passes are in the MoE layer's alone.
Nor is the output words' timed: the hook's view of the logits would forbid the loss to overwrite them.
What no part has is the embedding, norms, the loss and sums over ranks.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import nn

from common.timers import Timers, clock
from megamoe.model.architectures.decoder import GPT
from megamoe.model.moe_block import MoEBlock

# In the order of the table; the second level is inside what stands before it.
FORWARD = (
    *("attention", "FFN", "MoE layer", "MoE layer: router", "MoE layer: dispatch"),
    *("MoE layer: experts", "MoE layer: combine", "output words"),
)
BACKWARD = ("attention", "FFN", "MoE layer", "MoE layer: experts")


class PartTimers:
    """Seconds by ("forward" or "backward", part), summed over blocks, since they were last taken."""

    def __init__(self, model: GPT) -> None:
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._inside = Timers()
        for block in model.model.decoder.layers:
            self._watch(block.self_attention, "attention")
            self._watch(block.mlp, "MoE layer" if isinstance(block.mlp, MoEBlock) else "FFN")
            if block.inserted is not None:
                self._watch(block.inserted, "MoE layer")
        self._watch(model.model.output_layer, "output words", backward=False)
        for _, layer in model.moe_layers():
            self._watch(layer.experts, "MoE layer: experts")
            self._watch(layer.router, "MoE layer: router", backward=False)
            for method in ("dispatch", "combine"):
                self._inside.watch(layer.dispatcher, method, f"MoE layer: {method}")

    def take(self) -> dict[tuple[str, str], float]:
        """Return what was counted; from here on it is counted anew."""
        taken = {**self._seconds, **{("forward", name): s for name, s in self._inside.take().items()}}
        self._seconds.clear()
        return taken

    def _watch(self, module: nn.Module, name: str, backward: bool = True) -> None:
        begin, end = self._pair("forward", name)
        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)
        if backward:
            begin, end = self._pair("backward", name)
            module.register_full_backward_pre_hook(begin)
            module.register_full_backward_hook(end)

    def _pair(self, direction: str, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        started: list[float] = []

        def begin(*unused: Any) -> None:
            started.append(clock())

        def end(*unused: Any) -> None:
            self._seconds[direction, name] += clock() - started.pop()

        return begin, end
