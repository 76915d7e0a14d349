"""A trace of steps of training, whose kernels are summed by the parts of the roofline model."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from megamoe.apps.plan.counter import COMBINE, DISPATCH, GRADIENTS, Parts

PREFIX = "part: "


class PartRanges(TorchDispatchMode):
    """Inside, every operator runs in a range of the profiler that names its part."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self._parts = parts

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        with record_function(f"{PREFIX}{self._parts.current()}"):
            return function(*args, **(kwargs or {}))


@contextmanager
def parts_marked(trainer: Any) -> Iterator[None]:
    """Inside, what the trainer's steps launch is marked by part, as the plan counts it."""
    parts = Parts(trainer.model)
    engine = trainer.engine
    methods = [(engine, "backward", GRADIENTS), (engine, "finish_gradients", GRADIENTS)]
    methods += [(engine, "step", "optimizer")]
    for _, layer in trainer.model.moe_layers():
        sends = ("start", "finish", "dispatch_values", "dispatched_weights")
        methods += [(layer.dispatcher, name, DISPATCH) for name in sends]
        methods += [(layer.dispatcher, name, COMBINE) for name in ("combine", "combine_weighted")]
    with ExitStack() as stack:
        for owner, name, part in methods:
            plain = getattr(owner, name)
            setattr(owner, name, parts.within(part, plain))
            stack.callback(delattr, owner, name)
        # The backward pass runs in this thread, in which the ranges are.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(parts.followed())
        stack.enter_context(PartRanges(parts))
        yield


def profiled(steps: int, trainer: Any, on_cuda: bool) -> dict[str, Any]:
    """Train so many steps under the profiler.

    Return milliseconds of a step by part and by kernel, the share of the time in which the device was idle,
    and the milliseconds of collectives. Marks slow the host down; kernels they do not. On a CPU the times of
    operators stand for those of kernels; so they do where the profiler cannot see the device.
    """
    on_cuda = on_cuda and torch.profiler.ProfilerActivity.CUDA in torch.profiler.supported_activities()
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if on_cuda else []
    with torch.profiler.profile(activities=activities) as profile, parts_marked(trainer):
        for _ in range(steps):
            trainer.step()
        if on_cuda:
            torch.cuda.synchronize()
    parts: dict[str, float] = defaultdict(float)
    for event in profile.key_averages():
        if event.key.startswith(PREFIX) and event.device_type == torch.autograd.DeviceType.CPU:
            time_us = event.device_time_total if on_cuda else event.cpu_time_total
            parts[event.key.removeprefix(PREFIX)] += time_us / 1e3 / steps
    kernels: dict[str, float] = defaultdict(float)
    spans = []
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(PREFIX):
            kernels[event.name[:120]] += event.time_range.elapsed_us() / 1e3 / steps
            spans.append((event.time_range.start, event.time_range.end))
    longest = sorted(kernels.items(), key=lambda item: -item[1])
    return {
        "parts": dict(parts),
        "kernels": longest[:30],
        "nccl_ms": sum(ms for name, ms in kernels.items() if "nccl" in name.lower()),
        "idle": idle_share(spans),
    }


def idle_share(spans: list[tuple[float, float]]) -> float:
    """Return the share of the time from the first beginning to the last end that no span covers."""
    busy, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    whole = reached - min((begin for begin, _ in spans), default=0.0)
    return 1 - busy / whole if spans and whole > 0 else 0.0
