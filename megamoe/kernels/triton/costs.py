"""What the launches of the Triton kernels move, for the simulation of a step (`kernels/operators.py`)."""

from torch import Tensor


def bytes_of(*tensors: Tensor | None) -> int:
    """Return the size of these tensors, each read or written once."""
    return sum(each.numel() * each.element_size() for each in tensors if each is not None)


def each_once(*arguments: object, result: None) -> int:
    """Return the size of all tensors of a call: each is read or written once."""
    return bytes_of(*(each for each in arguments if isinstance(each, Tensor)))
