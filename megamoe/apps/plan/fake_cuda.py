"""PyTorch's torch.cuda and torch.nn without a GPU: answers for code that runs on fake CUDA tensors.

Seen with: torch 2.13, where an entry does not say otherwise.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch._dynamo  # a FakeTensorMode imports it, which fails where torch.cuda says that there is a device
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode

from megamoe.compat import replaced


@dataclass(frozen=True)
class FakeProperties:
    """What `torch.cuda.get_device_properties` says of the fake device.

    Reason: PyTorch has no public class that can be made without a device.
    Without it: code that asks for the memory or the number of processors of the device fails.
    Canary: check_fake_cuda.py::check_torch_cuda_answers
    """

    name: str = "fake"
    major: int = 9
    minor: int = 0
    total_memory: int = 80 << 30
    multi_processor_count: int = 132
    warp_size: int = 32


class _Stream(torch.Stream):
    """The one stream; torch.cuda.Stream cannot be made without CUDA."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        return super().__new__(cls, device=torch.device("cuda", 0))

    cuda_stream = 0

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Event()

    def synchronize(self) -> None: ...


class _Event:
    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *arguments, **options: value


def _constants(names: str, value: Any = None) -> dict[str, Any]:
    """Make a function of its own for each name: torch._dynamo refuses one of two names."""
    return {name: _constant(value) for name in names.split()}


def _answers(properties: FakeProperties) -> dict[str, Any]:
    generator = torch.random.default_generator
    return {
        **_constants(
            "_lazy_init init set_device synchronize empty_cache ipc_collect set_stream set_rng_state"
        ),
        **_constants("manual_seed manual_seed_all reset_peak_memory_stats reset_max_memory_allocated"),
        **_constants("reset_max_memory_cached"),
        **_constants("is_available is_initialized _is_compiled is_bf16_supported", True),
        **_constants("is_current_stream_capturing", False),
        **_constants("current_device memory_reserved max_memory_reserved memory_allocated", 0),
        **_constants("max_memory_allocated", 0),
        **_constants("device_count", 1),
        **_constants("get_device_capability", (properties.major, properties.minor)),
        **_constants("get_device_name", properties.name),
        **_constants("get_device_properties", properties),
        **_constants("mem_get_info", (properties.total_memory, properties.total_memory)),
        "memory_stats": lambda *_: defaultdict(int),
        "get_rng_state": lambda *_: generator.get_state(),
        "initial_seed": lambda: generator.initial_seed(),
        "default_generators": (generator,),
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "device": lambda device=None: contextlib.nullcontext(),
    }


@contextlib.contextmanager
def fake_torch_cuda(properties: FakeProperties = FakeProperties()) -> Iterator[None]:
    """Inside, torch.cuda answers as if there were one device, with one stream, that never waits.

    Reason: on a machine without a GPU torch.cuda refuses every call; DeepSpeed, Megatron-Core and megamoe
        ask it for streams, the current device and its memory.
    Without it: training code cannot run on fake CUDA tensors.
    Canary: check_fake_cuda.py::check_torch_cuda_answers
    """
    markers = _constants("range_push range_pop", 0)
    with replaced(torch.cuda, **_answers(properties)), replaced(torch.cuda.nvtx, **markers):
        yield


class FakeCudaMode(FakeTensorMode):
    """A FakeTensorMode that makes no real tensor on the device, though torch.cuda says that there is one.

    Reason: FakeTensorMode decides by torch.cuda.is_available, runs `record_stream` on real tensors, and knows
        no pinned memory. The mode itself is public in its documentation, but not by its name.
    Without it: `torch.tensor(1.0, device="cuda")` wants a real kernel.
    Canary: check_fake_cuda.py::check_constants_stay_fake
    """

    avoid_device_init = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator on fakes."""
        if func is torch.ops.aten.record_stream.default:
            return None
        if func is torch.ops.aten._pin_memory.default:
            func, args = torch.ops.aten.clone.default, args[:1]
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextlib.contextmanager
def modules_move_fakes() -> Iterator[None]:
    """Inside, `Module.to` and its like change the dtype of fake parameters in place, by `.data`.

    Reason: for fake tensors torch.nn.Module._apply swaps two tensors, which fails, as fake tensors hold weak
        references to each other.
    Without it: DeepSpeed cannot cast a fake model to bf16.
    Canary: check_fake_cuda.py::check_modules_of_fakes
    """

    def apply(self: nn.Module, function: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        for child in self.children() if recurse else ():
            child._apply(function)
        with torch.no_grad():
            for parameter in self._parameters.values():
                if parameter is not None and (moved := function(parameter)) is not parameter:
                    parameter.data = moved
            for name, buffer in self._buffers.items():
                self._buffers[name] = None if buffer is None else function(buffer)
        return self

    with replaced(nn.Module, _apply=apply):
        yield


@contextlib.contextmanager
def fakes_are_drawn() -> Iterator[None]:
    """Inside, `nn.init.trunc_normal_` draws no values.

    Reason: it draws again what is outside of its bounds, and so reads values.
    Without it: a model whose weights come from a truncated normal distribution cannot be built of fakes.
    Canary: check_fake_cuda.py::check_fakes_are_drawn
    """
    with replaced(nn.init, trunc_normal_=lambda tensor, *arguments, **options: tensor):
        yield


@contextlib.contextmanager
def unknown_sizes_raise(error: Exception) -> Iterator[None]:
    """Inside, an operator whose result's size depends on values, such as nonzero, raises `error` on fakes.

    Reason: the exception of fake tensors has no public name.
    Without it: a user of such a router reads a traceback.
    Canary: check_fake_cuda.py::check_unknown_sizes_raise
    """
    try:
        yield
    except DynamicOutputShapeException:
        raise error from None


def join_fake_group(rank: int, size: int) -> None:
    """Join a process group of so many ranks, whose collectives do nothing.

    Reason: PyTorch's fake process group is part of its own test tools.
    Without it: a rank of many cannot be simulated in one process.
    Canary: check_fake_cuda.py::check_fake_group
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())


@contextlib.contextmanager
def objects_are_alike() -> Iterator[None]:
    """Inside, every rank has this rank's object in an `all_gather_object`.

    Reason: it sends pickled objects as tensors and reads what it received, and fakes have no values.
    Without it: what asks all ranks for an error, or for the records of pipeline stages, fails on fakes.
    Canary: check_fake_cuda.py::check_objects_of_fakes
    """

    def gather(objects: list[Any], value: Any, group: Any = None) -> None:
        objects[:] = [value] * len(objects)

    with replaced(dist, all_gather_object=gather):
        yield


def ranks_of_collective(function: Any, arguments: tuple[Any, ...]) -> list[int]:
    """Return the global ranks of the process group that an operator of torch.ops.c10d is called with.

    Reason: the operators get the group as a boxed object, for which there is no public access.
    Without it: collectives cannot be counted by group.
    Canary: check_fake_cuda.py::check_ranks_of_collective
    """
    from torch.distributed._tools.fake_collectives import CollectiveOp

    group = CollectiveOp.get_process_group(function, arguments)
    return dist.get_process_group_ranks(group)


def sequence_number() -> int:
    """Return the number that the autograd node of the running forward operator has in this thread.

    Reason: PyTorch has no public link from an operator of the forward pass to its node.
    Without it: operators of the backward pass cannot be assigned to a part of the model.
    Canary: check_fake_cuda.py::check_backward_nodes_are_found
    """
    return int(torch.autograd._get_sequence_nr()) - 1


def running_node() -> int | None:
    """Return the number of the autograd node whose backward pass runs; None outside of a backward pass.

    Reason: see `sequence_number`.
    Without it: see `sequence_number`.
    Canary: check_fake_cuda.py::check_backward_nodes_are_found
    """
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def storage_key(tensor: torch.Tensor) -> int:
    """Return what is the same for tensors that share their memory, fake ones too, as long as it lives.

    Reason: fake tensors have no data_ptr.
    Without it: views of fake tensors cannot be told from copies.
    Canary: check_fake_cuda.py::check_storage_key
    """
    return int(tensor.untyped_storage()._cdata)


def on_cuda(tensor: torch.Tensor) -> bool:
    """Return `tensor.is_cuda`, without a call of the active modes.

    Reason: a mode is called for each `is_cuda` of a fake tensor, which is a third of all its calls.
    Without it: a simulation takes a tenth longer.
    Canary: check_fake_cuda.py::check_on_cuda
    """
    return tensor.fake_device.type == "cuda" if isinstance(tensor, FakeTensor) else tensor.is_cuda


def schema_of(function: Any) -> Any:
    """Return the schema of an OpOverload, with its arguments and whether it writes them.

    Reason: it has no public name.
    Without it: an operator that writes into its arguments cannot be told from one that reads them.
    Canary: check_fake_cuda.py::check_schema
    """
    return function._schema


# Operators that PyTorch builds with CUDA have a kernel for, and takes apart where it has none.
FUSED_ON_CUDA = ("silu_backward", "mish_backward", "_fused_rms_norm")


@cache
def _declare_cuda_kernels() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL", "CUDA")
    for name in FUSED_ON_CUDA:
        library.impl(name, _refuse)
    return library


def _refuse(*arguments: Any, **options: Any) -> None:
    raise NotImplementedError("only for fake tensors")


@contextlib.contextmanager
def fused_operators() -> Iterator[None]:
    """Inside, operators on fake CUDA tensors are those of a PyTorch with CUDA; see `_attention`.

    Reason: a PyTorch without CUDA has none of the fused kernels, and takes the plain forms: attention with
        S x S numbers, a norm of five operators, the gradient of SiLU of eight.
    Without it: these cost on fake CUDA tensors what they cost in no real run.
    Canary: check_fake_cuda.py::check_operators_are_fused
    """
    if torch.version.cuda is None:
        _declare_cuda_kernels()
    with replaced(nn.functional, scaled_dot_product_attention=_attention):
        yield


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Flash attention in 16 bits without a mask; else the memory-efficient kernel, with an additive mask."""
    aten = torch.ops.aten
    if attn_mask is None and query.element_size() == 2:
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    bias = attn_mask
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
        bias = bias.expand(*query.shape[:3], key.shape[2])  # type: ignore[union-attr]
    keeps = query.requires_grad
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, keeps, dropout_p, is_causal, scale=scale)[0]
