"""Bytes, FLOPs and launches of one operator on CUDA, from the shapes of its arguments and results.

Rules that hold for all: a view costs nothing; an operator reads each of its tensor arguments once and writes
each result once; what it updates in place is read and written. The tables below hold the exceptions.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from megamoe.apps.plan.fake_cuda import schema_of, storage_key
from megamoe.kernels.operators import cost_of

# These allocate memory, or talk to the allocator, and launch nothing.
NO_LAUNCH = {
    *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"),
    *("aten::new_empty_strided", "aten::record_stream", "aten::set_", "aten::resize_"),
}
# These write their argument in place without reading it.
OVERWRITES = {"aten::zero_", "aten::fill_", "aten::copy_", "aten::uniform_", "aten::normal_"}
OVERWRITES |= {"aten::_foreach_copy_", "aten::_foreach_zero_", "aten::arange"}
# These read as many elements of their first argument as they return.
READS_CHOSEN = {"aten::index_select", "aten::gather", "aten::embedding", "aten::index"}
# These read and write as many elements of their first argument as their source has, at random places.
ADDS_INTO = {"aten::index_add_", "aten::scatter_add_", "aten::index_put_", "aten::index_copy_"}
# Kernels of one call; 1 of all others. Sorts are radix sorts of 64-bit keys; a grouped GEMM prepares its
# problems.
LAUNCHES = {"aten::sort": 8, "aten::topk": 2, "aten::_grouped_mm": 2, "aten::cumsum": 2, "aten::nonzero": 3}
LAUNCHES |= {"aten::_fused_rms_norm_backward": 2, "aten::_scaled_dot_product_flash_attention_backward": 3}
# Passes over the memory of one call; 1 of all others.
PASSES = {"aten::sort": 8}
FLASH = {
    "aten::_scaled_dot_product_flash_attention": 5,
    "aten::_scaled_dot_product_flash_attention_backward": 10,
}


@dataclass(frozen=True)
class OperatorCost:
    """launches: kernels. bytes: read and written. flops: of matrix products, 2 per multiply and add."""

    launches: int
    bytes: int
    flops: int


def operator_cost(
    function: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any
) -> OperatorCost:
    """What a call of an operator (OpOverload) costs, that has returned `result`."""
    name = name_of(function)
    declared = cost_of(name)
    if declared is not None:
        moved = declared.bytes_moved or _bytes_of_all
        flops = declared.flops(*arguments, result=result, **options) if declared.flops else 0
        return OperatorCost(declared.launches, moved(*arguments, result=result, **options), flops)
    if name in NO_LAUNCH or is_view(function, arguments, options, result):
        return OperatorCost(0, 0, 0)
    moved_bytes = _bytes(name, function, arguments, options, result) * PASSES.get(name, 1)
    return OperatorCost(LAUNCHES.get(name, 1), moved_bytes, flops_of(function, arguments, options, result))


def flops_of(function: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> int:
    """Count FLOPs by PyTorch's formulas; grouped products, for which it has none, by ours; causal attention:
    half.
    """
    name = name_of(function)
    if name == "aten::_grouped_mm":
        rows, matrix = arguments[0], arguments[1]
        return 2 * math.prod(rows.shape) * matrix.shape[-1]
    formula = flop_registry.get(function.overloadpacket)
    if formula is None:
        return 0
    flops = int(formula(*arguments, **options, out_val=result))
    place = FLASH.get(name)
    causal = place is not None and next((a for a in arguments[3:] if isinstance(a, bool)), False)
    return flops // 2 if causal else flops


def is_view(function: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> bool:
    """Whether nothing is written: each result shares its memory with an argument."""
    if schema_of(function).is_mutable:
        return False
    given = {storage_key(tensor) for tensor in tensors_in((arguments, options))}
    results = list(tensors_in(result))
    return bool(results) and all(storage_key(tensor) in given for tensor in results)


def name_of(function: Any) -> str:
    """`aten::mm` of an OpOverload."""
    return str(function.name()).partition(".")[0]


def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and dictionaries."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; what is expanded is in memory once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0]
    return math.prod(sizes) * tensor.element_size()


def _bytes_of_all(*arguments: Any, result: Any, **options: Any) -> int:
    return sum(map(tensor_bytes, tensors_in((arguments, options, result))))


def _bytes(name: str, function: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> int:
    rule = _RULES.get(name)
    if rule is not None:
        return rule(arguments, result)
    values = [*zip(schema_of(function).arguments, arguments, strict=False)]
    values += [(each, options[each.name]) for each in schema_of(function).arguments if each.name in options]
    total = 0
    given = set()
    for argument, value in values:
        written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(value):
            given.add(storage_key(tensor))
            times = 1 if not written or name in OVERWRITES else 2
            total += times * tensor_bytes(tensor)
    return total + sum(tensor_bytes(each) for each in tensors_in(result) if storage_key(each) not in given)


def _chosen(arguments: tuple[Any, ...], result: Any) -> int:
    indices = sum(map(tensor_bytes, tensors_in(arguments[1:])))
    return indices + 2 * sum(map(tensor_bytes, tensors_in(result)))


def _added(arguments: tuple[Any, ...], result: Any) -> int:
    rest = list(tensors_in(arguments[1:]))
    source = max(map(tensor_bytes, rest), default=0)
    return sum(map(tensor_bytes, rest)) + 2 * source


def _added_to_copy(arguments: tuple[Any, ...], result: Any) -> int:
    return 2 * tensor_bytes(arguments[0]) + _added(arguments, result)


def _adamw(arguments: tuple[Any, ...], result: Any) -> int:
    """Weights and moments are read and written, gradients are read."""
    weights, gradients, means, squares = arguments[:4]
    updated = sum(map(tensor_bytes, tensors_in([weights, means, squares])))
    return 2 * updated + sum(map(tensor_bytes, gradients))


def _norm_gradients(arguments: tuple[Any, ...], result: Any) -> int:
    """One kernel for the rows and one for the weight: both read the rows and their gradient."""
    return 5 * tensor_bytes(arguments[1])


_Rule = Callable[[tuple[Any, ...], Any], int]
_RULES: dict[str, _Rule] = dict.fromkeys(READS_CHOSEN, _chosen)
_RULES |= dict.fromkeys(ADDS_INTO, _added)
_RULES |= dict.fromkeys([name.rstrip("_") for name in ADDS_INTO], _added_to_copy)
_RULES["aten::_fused_rms_norm_backward"] = _norm_gradients
_RULES |= dict.fromkeys(["aten::_fused_adamw_", "aten::_fused_adam_"], _adamw)


def dtype_of(arguments: tuple[Any, ...]) -> torch.dtype:
    """Return the dtype in which a product is computed, which is that of its first tensor."""
    return next((tensor.dtype for tensor in tensors_in(arguments)), torch.float32)
