"""Counts operators, bytes, FLOPs, collectives, synchronisations and memory by part of the step while code
runs on fakes.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from megamoe.apps.plan.fake_cuda import on_cuda, ranks_of_collective, running_node, schema_of, sequence_number
from megamoe.apps.plan.memory import ACTIVATIONS, BATCH, TEMPORARY, MemoryTimeline
from megamoe.apps.plan.operators import dtype_of, name_of, operator_cost, tensor_bytes, tensors_in

DISPATCH, COMBINE = "dispatch", "combine"
SHARED_EXPERTS = "shared experts"
WEIGHT_GRADIENTS = "experts, weight gradients"  # where they are computed beside the exchange
# Classes whose modules are parts, by name: Megatron-Core's, and ours.
PART_OF_CLASS = {
    "SelfAttention": "attention",
    "MultiLatentAttention": "latent attention",
    "Router": "router",
    "GroupedExperts": "experts",
    "ExpertStack": "experts",
    "WeightGradients": WEIGHT_GRADIENTS,
    "SharedExperts": SHARED_EXPERTS,
    "MoELayer": "MoE layer, rest",
    "MLP": "dense FFN",
    "TransformerBlock": "norms and residuals",
    "TransformerLayer": "norms and residuals",
    "CrossAttention": "attention",
    "GPTModel": "vocabulary and loss",
    "Encoder": "vocabulary and loss",
    "EncoderDecoder": "vocabulary and loss",
}
REST = "step, rest"
GRADIENTS = "gradients"  # accumulated, and reduced over ranks
STAGES = "between stages"  # what pipeline stages send each other, beside their passes


class Parts:
    """Follows modules through the forward pass, and autograd nodes back to them.

    An operator of the forward pass runs below a module, and creates the autograd node of a number. An
    operator of the backward pass runs in a node of that number.
    """

    def __init__(self, model: nn.Module) -> None:
        self._part_of_module = {module: part for module in model.modules() if (part := part_of(module))}
        for name, module in model.named_modules():
            if ".losses." in f".{name}.":
                self._part_of_module[module] = "router"
        self._stack: list[str] = []
        self._part_of_node: dict[int, str] = {}

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """Inside, operators belong to this part."""
        self._stack.append(part)
        try:
            yield
        finally:
            self._stack.pop()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, modules are followed."""

        def enter(module: nn.Module, arguments: Any) -> None:
            if module in self._part_of_module:
                self._stack.append(self._part_of_module[module])

        def leave(module: nn.Module, arguments: Any, result: Any) -> None:
            if module in self._part_of_module:
                self._stack.pop()

        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(enter).remove)
            stack.callback(register_module_forward_hook(leave, always_call=True).remove)
            yield

    def current(self) -> str:
        """The part of the operator that runs now."""
        node = running_node()
        if node is None:
            part = self._stack[-1] if self._stack else REST
            self._part_of_node[sequence_number()] = part
            return part
        if len(self._stack) > 1:  # a block that is computed again in the backward pass
            return self._stack[-1]
        return self._part_of_node.get(node, GRADIENTS)

    def within(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose operators belong to this part."""

        def inside(*arguments: Any, **options: Any) -> Any:
            with self.inside(part):
                return function(*arguments, **options)

        return inside


def part_of(module: nn.Module) -> str | None:
    """Return a module's part, by the name of its class or of its bases, the most derived first."""
    for kind in type(module).__mro__:
        if kind.__name__ in PART_OF_CLASS:
            return PART_OF_CLASS[kind.__name__]
    return None


CATEGORY_OF_PHASE = {"forward": ACTIVATIONS, "step": BATCH}  # of what is allocated then


class Total:
    """Numbers that are added."""

    def add(self, other: Self) -> None:
        """Add other numbers to these."""
        for name, number in vars(other).items():
            setattr(self, name, getattr(self, name) + number)


@dataclass
class OperatorTotal(Total):
    """Calls of one operator in one part and phase, with one dtype."""

    calls: int = 0
    launches: int = 0
    bytes: int = 0
    flops: int = 0


@dataclass(frozen=True)
class OperatorKey:
    """shape: of the first tensors, so that calls of one size are together."""

    part: str
    phase: str
    name: str
    dtype: str
    shape: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class CollectiveKey:
    """kind: the operator of torch.ops.c10d, also `send` to one of the ranks. ranks: the global ranks of the
    group. is_async: the caller goes on at once, and waits for it later.
    """

    part: str
    phase: str
    kind: str
    ranks: tuple[int, ...]
    is_async: bool = False


@dataclass
class CollectiveTotal(Total):
    """bytes: of the largest of input and output on this rank."""

    calls: int = 0
    bytes: int = 0


@dataclass
class Counts:
    """What was counted in a step or a part of it.

    waits: of the host for the device, by part: it reads from the device, or copies to it from memory that is
    not pinned. order: the keys of all calls, one after the other; None: a wait.
    """

    operators: dict[OperatorKey, OperatorTotal] = field(default_factory=lambda: defaultdict(OperatorTotal))
    collectives: dict[CollectiveKey, CollectiveTotal] = field(
        default_factory=lambda: defaultdict(CollectiveTotal)
    )
    waits: Counter[str] = field(default_factory=Counter)
    order: list[OperatorKey | CollectiveKey | None] = field(default_factory=list)

    def wait(self, part: str) -> None:
        """Count a wait of the host."""
        self.waits[part] += 1
        self.order.append(None)

    def add(self, other: "Counts") -> None:
        """Add other counts to these."""
        for key, operator in other.operators.items():
            self.operators[key].add(operator)
        for group, collective in other.collectives.items():
            self.collectives[group].add(collective)
        self.waits += other.waits
        self.order += other.order


class CostCounter(TorchDispatchMode):
    """Counts what runs on fake tensors of a device; enter it inside a FakeTensorMode.

    on_cuda: whether the device is a CUDA device with a host beside it, or the CPU. phase: forward, backward
    or optimizer, set by the caller. kept: the share of a mask's entries that are true, where a
    tensor-parallel rank takes the pairs of its own tokens; None: no mask's share is known. A read of a fake
    scalar gives 1.0, of an integer or bool 0.
    """

    def __init__(self, parts: Parts, on_cuda: bool = True) -> None:
        super().__init__()
        self.parts = parts
        self._on_cuda = on_cuda
        self.phase = "step"
        self.kept: float | None = None
        self.counts = Counts()
        self.memory, self.host = MemoryTimeline(), MemoryTimeline()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and count one operator."""
        kwargs = kwargs or {}
        name = name_of(function)
        if name.startswith("prim::"):
            return function(*args, **kwargs)
        part = self.parts.current()
        if name == "aten::_local_scalar_dense":
            return self._read(args[0], part)
        if name == "aten::nonzero" and self.kept is not None and args[0].dim() == 1 and self._here(args[0]):
            result = args[0].new_empty((round(self.kept * len(args[0])), 1), dtype=torch.int64)
            self.counts.wait(part)
        else:
            result = function(*args, **kwargs)
        if name.startswith("c10d::"):
            self._count_collective(function, args, kwargs, part)
        else:
            self._count(function, args, kwargs, result, part)
        for tensor in tensors_in(result):
            if not tensor.is_meta:
                self.memory_of(tensor).add(tensor, CATEGORY_OF_PHASE.get(self.phase, TEMPORARY), part)
        return result

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Inside, what runs belongs to this phase."""
        before, self.phase = self.phase, phase
        self.memory.begin_phase(phase)
        try:
            yield
        finally:
            self.phase = before
            self.memory.begin_phase(before)

    def memory_of(self, tensor: Tensor) -> MemoryTimeline:
        """Return the device's memory, or the host's."""
        return self.memory if self._here(tensor) else self.host

    def _here(self, tensor: Tensor) -> bool:
        return on_cuda(tensor) == self._on_cuda

    def _read(self, tensor: Tensor, part: str) -> float | int | bool:
        if self._here(tensor):
            self.counts.wait(part)
        if tensor.dtype == torch.bool:
            return False
        return 1.0 if tensor.is_floating_point() else 0

    def _count(self, function: Any, args: Any, kwargs: Any, result: Any, part: str) -> None:
        given, made = list(tensors_in((args, kwargs))), list(tensors_in(result))
        on_device = [self._here(tensor) for tensor in [*given, *made]]
        if not any(on_device):
            return
        name = name_of(function)
        if name in ("aten::_to_copy", "aten::copy_") and not all(
            self._here(tensor) for tensor in [*given[:2], *made]
        ):
            self._count_copy(given, made, kwargs, args, part)
        cost = operator_cost(function, args, kwargs, result)
        if not cost.launches:
            return
        shape = tuple(tuple(tensor.shape) for tensor in given[:2])
        key = OperatorKey(part, self.phase, name, str(dtype_of(args)).removeprefix("torch."), shape)
        self.counts.order.append(key)
        self.counts.operators[key].add(OperatorTotal(1, cost.launches, cost.bytes, cost.flops))

    def _count_copy(self, given: list[Tensor], made: list[Tensor], kwargs: Any, args: Any, part: str) -> None:
        """A copy between host and device. The host waits for one from the device."""
        target = made[0] if made else given[0]
        blocking = not kwargs.get("non_blocking", len(args) > 2 and args[2])
        if blocking or not self._here(target):
            self.counts.wait(part)

    def _count_collective(self, function: Any, args: Any, kwargs: Any, part: str) -> None:
        kind = name_of(function).removeprefix("c10d::").strip("_")
        if "barrier" in kind or kind == "recv":  # what is received is counted where it is sent
            return
        ranks = tuple(ranks_of_collective(function, args))
        # An argument of the default value, which is true, is left out of `args`.
        names = [argument.name for argument in schema_of(function).arguments]
        is_async = bool(
            {**dict(zip(names, args, strict=False)), **kwargs}.get("async_op", "async_op" in names)
        )
        key = CollectiveKey(part, self.phase, kind, ranks, is_async)
        self.counts.order.append(key)
        most = max(sum(map(tensor_bytes, tensors_in(arg))) for arg in args)
        self.counts.collectives[key].add(CollectiveTotal(1, most))
