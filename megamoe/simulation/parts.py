"""To which part of the training step an operator belongs, in the forward and the backward pass."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from megamoe.compat.fake_cuda import running_node, sequence_number

# Classes whose modules are parts, by name: Megatron-Core's, and ours.
PART_OF_CLASS = {
    "SelfAttention": "attention",
    "Router": "router",
    "GroupedExperts": "experts",
    "ExpertStack": "experts",
    "SharedExperts": "shared experts",
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
    """By the name of its class or of one of its bases, the most derived first."""
    for kind in type(module).__mro__:
        if kind.__name__ in PART_OF_CLASS:
            return PART_OF_CLASS[kind.__name__]
    return None
