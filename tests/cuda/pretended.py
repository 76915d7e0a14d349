"""A CUDA device of host memory, in this process: `start()` before anything asks PyTorch for CUDA.

The library (`device.cpp`) runs the CPU's kernels on tensors that say cuda; this file fills in `torch.cuda`,
and lets process groups that ask for NCCL be gloo's. What is found is in `findings`, by file and line:

- sync: the host waited for the device; pageable: a copy from memory that is not pinned
- mixed: tensors of different devices in one operator, or a CPU tensor for NCCL (both are refused, too)
- race: two streams used a tensor, and neither had waited for the other; or its memory was freed meanwhile
- both_ways: a rank sends to another and receives from it in one group. NCCL runs them one after the other, so
  two ranks that both send first wait for ever. gloo's sends end at once
- collective: its name and the tensors' sizes

It cannot see the numbers and the speed of CUDA's own kernels, nor NCCL's.
"""

import atexit
import contextlib
import ctypes
import functools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.cuda.build import built

ROOT = Path(__file__).resolve().parents[2]
OWN_CODE = ("megamoe", "tests")  # folders of this checkout
LIBRARIES = ("deepspeed", "megatron", "transformer_engine")
PATCHES = "tests/cuda/pretended.py"
DEPTH = 6  # frames that a finding keeps
TELL = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p)
FAULTS = ("mixed", "race", "both_ways")  # kinds of findings that no run may have
COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "gather", "scatter", "all_gather", "all_gather_into_tensor"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("send", "recv", "isend", "irecv"),
)


@dataclass(frozen=True)
class Finding:
    """where: file:line of the frames in megamoe, the tests and the libraries, the innermost first."""

    kind: str
    name: str
    detail: str
    where: tuple[str, ...]

    def place(self) -> str:
        """What waits and where, without the sizes."""
        return f"{self.name} at {' < '.join(self.where[:3]) or 'a C++ thread (backward pass)'}"

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.name}{detail} at {' < '.join(self.where) or 'a C++ thread (backward pass)'}"


findings: list[Finding] = []
new_groups: list[tuple[int, ...]] = []  # the ranks of every process group that was made, in order
_nccl: set[Any] = set()  # the groups that stand for NCCL's
_with_gloo: set[Any] = set()  # those of them that have gloo too, for objects
device_uses: list[str] = []  # what selected the device
_directions: dict[tuple[Any, int], str] = {}  # by group and peer: "send" or "recv"
_works: list[list[Any]] = []  # of the coalescing managers that are open


def of_kind(kind: str, since: int = 0) -> list[Finding]:
    """The findings of that kind from the index `since` on."""
    return [finding for finding in findings[since:] if finding.kind == kind]


def _frames() -> tuple[str, ...]:
    found: list[str] = []
    try:
        frame = sys._getframe(2)
    except ValueError:  # a thread of the autograd engine, outside of Python
        return ()
    while frame is not None and len(found) < DEPTH:
        name = shown_path(frame.f_code.co_filename)
        if name is not None and name != PATCHES:
            found.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


@functools.cache
def shown_path(file: str, root: str = str(ROOT)) -> str | None:
    """A file relative to the checkout, or to site-packages if it is of LIBRARIES; None for others.

    Installed files come first: an environment may lie within the checkout.
    """
    installed = file.rpartition("/site-packages/")[2] if "/site-packages/" in file else ""
    if installed:
        return installed if installed.split("/")[0] in LIBRARIES else None
    own = file.removeprefix(f"{root}/")
    return own if own != file and own.split("/")[0] in OWN_CODE else None


@TELL
def _tell(kind: bytes, name: bytes, detail: bytes) -> None:
    findings.append(Finding(kind.decode(), name.decode(), detail.decode(), _frames()))


class Device:
    """The library, and how many devices it shows."""

    def __init__(self, path: str, devices: int) -> None:
        self.devices = devices
        self.library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        self.library.pretended_stream.restype = ctypes.c_int64
        self.library.pretended_most_pinned_bytes.restype = ctypes.c_int64
        self.library.pretended_most_device_bytes.restype = ctypes.c_int64
        self.library.pretended_start(devices, 0, _tell)
        atexit.register(self.library.pretended_start, devices, 0, None)

    def kernels(self) -> dict[str, int]:
        """How often each kernel was launched since the last call."""
        text = ctypes.create_string_buffer(1 << 20)
        self.library.pretended_kernels(text, len(text))
        lines = [line.split("\t") for line in text.value.decode().splitlines()]
        return {name: int(count) for name, count in lines}

    def most_pinned_bytes(self) -> int:
        """The most pinned memory at a time since the last call; PyTorch takes a power of two for each."""
        return int(self.library.pretended_most_pinned_bytes())

    def most_device_bytes(self) -> int:
        """The most bytes of tensors on all devices at a time since the last call."""
        return int(self.library.pretended_most_device_bytes())

    def set_device(self, device: Any) -> None:
        """torch.cuda.set_device."""
        import torch

        index = device if isinstance(device, int) else torch.device(device).index
        if index is None:
            return
        if not 0 <= index < self.devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index} of {self.devices} devices")
        self.library.pretended_set_device(index)
        device_uses.append(f"set_device({index})")

    def synchronize(self, device: Any = None) -> None:
        """torch.cuda.synchronize."""
        self.library.pretended_wait_for_all()
        findings.append(Finding("sync", "cuda.synchronize", "", _frames()))


def start(devices: int = 1) -> Device:
    """Load the device, built at the first call on a machine, and let PyTorch show it.

    Raises:
        BuildError: where it cannot be built.
    """
    device = Device(str(built()), devices)
    import torch

    _patch(torch.cuda, _queries(device) | _memory_and_draws(devices) | _streams(device))
    _patch(torch.cuda.streams, {name: getattr(torch.cuda, name) for name in ("Stream", "Event")})
    torch.version.cuda = "12.9"
    internals = {
        # Functions of their own: TorchDynamo refuses one function under two names.
        "_cuda_getDevice": lambda: torch.cuda.current_device(),
        "_cuda_setDevice": lambda index: device.set_device(index),
        "_cuda_getDeviceCount": lambda: torch.cuda.device_count(),
        "_cuda_synchronize": lambda: device.synchronize(),
        "_cuda_isInBadFork": _always(False),
        "_cuda_getCurrentRawStream": _always(0),
    }
    _patch(torch._C, {name: call for name, call in internals.items() if not hasattr(torch._C, name)})
    _pretend_nccl()
    return device


def _patch(module: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(module, name, value)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *unused, **also_unused: value


def _queries(device: Device) -> dict[str, Any]:
    """What the simulation's fake device answers too, and what a device of its own is needed for."""
    from megamoe.apps.plan.fake_cuda import FakeProperties, _answers

    class Context:
        def __init__(self, wanted: Any) -> None:
            self.wanted = wanted

        def __enter__(self) -> None:
            self.before = device.library.pretended_device()
            if self.wanted is not None:
                device.set_device(self.wanted)

        def __exit__(self, *unused: object) -> None:
            device.set_device(self.before)

    named = asdict(FakeProperties(name="Pretended CUDA"))
    properties: Any = types.SimpleNamespace(**named, gcnArchName="", uuid="0")
    return {
        **_answers(properties),
        "can_device_access_peer": _always(True),
        "_is_in_bad_fork": _always(False),
        "device_count": _always(device.devices),
        "current_device": lambda: int(device.library.pretended_device()),
        "set_device": device.set_device,
        "synchronize": device.synchronize,
        "device": Context,
        "nccl": types.SimpleNamespace(version=_always((2, 27, 0)), is_available=_always(True)),
        "nvtx": types.SimpleNamespace(
            range_push=_always(None), range_pop=_always(None), range=_always(contextlib.nullcontext())
        ),
    }


def _memory_and_draws(devices: int) -> dict[str, Any]:
    """Memory is the host's, and so is the generator: draws are those of a run on the CPU."""
    import torch

    host = torch.random.default_generator
    return {
        "reset_accumulated_memory_stats": _always(None),
        **{name: _always(0) for name in ("memory_cached", "max_memory_cached")},
        "mem_get_info": _always((70 << 30, 80 << 30)),
        "get_rng_state": lambda device="cuda": host.get_state().clone(),
        "set_rng_state": lambda state, device="cuda": host.set_state(state),
        "default_generators": (host,) * devices,
    }


def _streams(device: Device) -> dict[str, Any]:
    """Streams and events of the library, under torch.cuda's names."""
    import torch

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **numbers: int) -> Any:
            if "stream_id" in numbers:
                return super().__new__(cls, **numbers)
            known = device is None or isinstance(device, int)
            return super().__new__(cls, device=torch.device("cuda") if known else torch.device(device))

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

        def wait_stream(self, other: torch.Stream) -> None:
            self.wait_event(other.record_event())

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, **unused: bool) -> Any:
            return super().__new__(cls, device="cuda", enable_timing=enable_timing)

        elapsed_time = staticmethod(lambda other: 0.0)  # the device has no clock

    def number(stream: int) -> Stream:
        index = device.library.pretended_device()
        return Stream(stream_id=stream, device_index=index, device_type=1)

    @contextlib.contextmanager
    def entered(stream: Any) -> Iterator[None]:
        with stream or contextlib.nullcontext():
            yield

    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device_=None: number(device.library.pretended_stream()),
        "default_stream": lambda device_=None: number(0),
        "stream": entered,
        "StreamContext": entered,
        "set_stream": lambda stream: torch.accelerator.set_stream(stream),
    }


def _pretend_nccl() -> None:
    """Groups that ask for NCCL are gloo's, and take CUDA tensors only."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    begin, make = dist.init_process_group, dist.new_group

    def is_nccl(backend: Any) -> bool:
        return backend is None or "nccl" in str(backend)

    def rename(group: Any) -> None:
        if isinstance(group, dist.ProcessGroup):
            c10d._world.pg_map[group] = ("nccl", c10d._world.pg_map[group][1])
            _nccl.add(group)

    # DeepSpeed passes `device_id` if the signature has it.
    def init_process_group(
        backend: Any = None, *args: Any, device_id: Any = None, pg_options: Any = None, **kwargs: Any
    ) -> None:
        if device_id is not None:
            device_uses.append("init_process_group(device_id)")  # NCCL connects at once
        begin("gloo" if is_nccl(backend) else backend, *args, **kwargs)
        if is_nccl(backend):
            rename(c10d._get_default_group())
        if "gloo" in str(backend):
            _with_gloo.add(c10d._get_default_group())

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *_: Any, **kwargs: Any) -> Any:
        new_groups.append(tuple(ranks or range(dist.get_world_size())))
        group = make(
            ranks, timeout, "gloo" if is_nccl(backend) else backend, group_desc=kwargs.get("group_desc")
        )
        if is_nccl(backend):
            rename(group)
        return group

    patches: dict[str, Any] = {
        "init_process_group": init_process_group,
        "new_group": new_group,
        "is_nccl_available": _always(True),
        "_coalescing_manager": _coalescing,
        **{name: _checked(name, getattr(c10d, name)) for name in COLLECTIVES},
    }

    def object_device(group: Any = None) -> str:
        return "cpu" if (group or c10d._get_default_group()) in _with_gloo else "cuda"

    _patch(c10d, {**patches, "_get_object_coll_device": object_device})
    _patch(dist, patches)


def _checked(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses CPU tensors where the group is NCCL's alone."""
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed import distributed_c10d as c10d

    def is_host(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(is_host, value))
        return isinstance(value, torch.Tensor) and value.device.type == "cpu"

    @functools.wraps(collective)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        groups = [value for value in given if isinstance(value, ProcessGroup)]
        group = groups[0] if groups else c10d._get_default_group()
        if group in _nccl - _with_gloo and any(map(is_host, given)):
            findings.append(Finding("mixed", f"dist.{name}", "a CPU tensor for NCCL", _frames()))
            raise RuntimeError(f"dist.{name}: No backend type associated with device type cpu")
        if (direction := name.removeprefix("i")) in ("send", "recv") and not any(map(is_host, given)):
            peer = next(value for value in given if isinstance(value, int))
            if _directions.setdefault((group, peer), direction) != direction:
                findings.append(Finding("both_ways", f"dist.{name}", f"rank {peer}", _frames()))
        work = collective(*args, **kwargs)
        if _works and work is not None:
            _works[-1].append(work)
        return work

    return checked


class _Coalesced:
    """What a coalescing manager gives: the works of the collectives inside it."""

    def __init__(self) -> None:
        self.works: list[Any] = []

    def append(self, work: Any) -> None:
        self.works.append(work)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()


@contextlib.contextmanager
def _coalescing(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[_Coalesced]:
    """One collective after the other, for which `wait` waits."""
    together = _Coalesced()
    _works.append(together.works)
    try:
        yield together
    finally:
        _works.pop()
    if not async_ops:
        together.wait()
