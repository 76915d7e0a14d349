"""Activation recomputation: the backward pass computes values again instead of keeping them.

`recomputed` runs a whole function again. Inside `DiscardedOutputs`, `discard_output` keeps a function's
inputs in place of its outputs, for functions whose outputs are what the next operators save: a norm, an
activation, a projection.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megamoe.compat.torch_compat import memory_key
from megamoe.moe.interleaving import uninterrupted


class Recomputable(Protocol):
    """What is told that it is being computed again."""

    recomputing: bool


def recomputed(
    function: Callable[..., Any],
    layers: Sequence[Recomputable],
    *args: Any,
    way: Callable[..., Any] = checkpoint,
    **kwargs: Any,
) -> Any:
    """Return function(*args, **kwargs), recomputed in backward with the same random draws.

    layers: the MoE layers inside, whose `recomputing` is set meanwhile. way: `checkpoint` of PyTorch, or a
    function with its arguments. The non-reentrant form keeps the graph of the first computation, so a routing
    that an objective uses later still carries gradient. What is recomputed, including collectives, depends on
    the graph's shape alone and is the same on all ranks.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    options: dict[str, Any] = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), _Again(layers))}
    return way(function, *args, **options, **kwargs)


class _Again(AbstractContextManager[None]):
    """Marks layers as being recomputed; may be entered again, for a second backward pass."""

    def __init__(self, layers: Sequence[Recomputable]) -> None:
        self.layers = layers

    def __enter__(self) -> None:
        self._alone = uninterrupted()
        self._alone.__enter__()
        self._mark(True)

    def __exit__(self, *raised: Any) -> None:
        self._mark(False)
        self._alone.__exit__(*raised)

    def _mark(self, recomputing: bool) -> None:
        for layer in self.layers:
            layer.recomputing = recomputing


class DiscardedOutputs(AbstractContextManager[None]):
    """Context of a forward pass in which autograd does not keep what `discard_output` returned.

    Where an operator saves such an output, or a view of it, the graph gets its function and inputs instead.
    The first read in the backward pass computes the output, the last one frees it. All operators of the
    forward pass that save it must lie inside.
    """

    def __init__(self) -> None:
        self._outputs: dict[int, tuple[_Call, int]] = {}
        self._alive: list[Tensor] = []  # while inside, no other tensor can take the memory of an output
        self._hooks: Any = None

    def __enter__(self) -> None:
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        _entered.contexts.append(self)

    def __exit__(self, *raised: object) -> None:
        _entered.contexts.pop()
        self._hooks.__exit__(*raised)
        self._outputs.clear()
        self._alive.clear()

    def add(
        self, outputs: tuple[Tensor, ...], function: Callable[..., Any], inputs: tuple[Tensor, ...]
    ) -> None:
        """Discard what `function` computed from `inputs`; an output that is a view of an input is kept."""
        given = {memory_key(each) for each in inputs}
        call = _Call(function, tuple(each.detach() for each in inputs))
        for place, output in enumerate(outputs):
            if memory_key(output) not in given:
                self._outputs[memory_key(output)] = call, place
                self._alive.append(output)

    def _pack(self, tensor: Tensor) -> "Tensor | _View":
        found = self._outputs.get(memory_key(tensor))
        if found is None:
            return tensor
        call, place = found
        if call.saves == 0:
            call.inputs = tuple(self._pack(each) for each in call.given)
            call.given = ()
        call.saves += 1
        return _View(call, place, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


class _Entered(threading.local):
    """The contexts that this thread's pass is in: as autograd's own, each thread has others."""

    def __init__(self) -> None:
        self.contexts: list[DiscardedOutputs] = []


_entered = _Entered()


def discard_output(function: Callable[..., Any], *inputs: Tensor) -> Any:
    """Return function(*inputs), one tensor or a tuple; inside `DiscardedOutputs` backward computes it again.

    The function draws no random numbers, and gives the same strides each time.
    """
    output = function(*inputs)
    register_discarded(output, function, *inputs)
    return output


def register_discarded(output: Any, function: Callable[..., Any], *inputs: Tensor) -> None:
    """Inside `DiscardedOutputs`, let the backward pass compute `output` as function(*inputs)."""
    if _entered.contexts and torch.is_grad_enabled():
        outputs = output if isinstance(output, tuple) else (output,)
        _entered.contexts[-1].add(outputs, function, inputs)


class _Call:
    """A function and its inputs, some of which are discarded outputs themselves.

    given: its inputs before the first save. inputs: what is kept of them. saves: how often its outputs were
    saved, thus how often they are read in one backward pass. Each CUDA stream computes them for itself.
    """

    def __init__(self, function: Callable[..., Any], given: tuple[Tensor, ...]) -> None:
        self.function, self.given = function, given
        self.inputs: tuple[Tensor | _View, ...] = ()
        self.saves = 0
        self._reads = 0
        self._outputs: dict[int, tuple[Tensor, ...]] = {}

    def read(self, place: int) -> Tensor:
        """Return an output, and free all after the last read."""
        inputs = () if (stream := self._stream()) in self._outputs else tuple(map(_unpack, self.inputs))
        if stream not in self._outputs:
            with torch.no_grad():
                found = self.function(*inputs)
            self._outputs[stream] = found if isinstance(found, tuple) else (found,)
            for each in inputs:
                if each.is_cuda:  # it may have been made on another stream
                    each.record_stream(torch.cuda.current_stream(each.device))
        output = self._outputs[stream][place]
        self._reads += 1
        if self._reads == self.saves:
            self._outputs.clear()
            self._reads = 0
        return output

    def _stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream if torch.cuda.is_initialized() else 0


@dataclass(frozen=True)
class _View:
    """A view of output `place` of a call."""

    call: _Call
    place: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _unpack(saved: Tensor | _View) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    return saved.call.read(saved.place).as_strided(saved.shape, saved.stride, saved.offset)
