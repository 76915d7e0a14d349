"""Section `attention`: PyTorch's attention by backend and head size, causal, forward and backward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu.findings import Machine, Section
from gpu.rates import peak_of, seconds_of

BACKENDS = {
    "cuDNN": [SDPBackend.CUDNN_ATTENTION],
    "FlashAttention": [SDPBackend.FLASH_ATTENTION],
    "memory-efficient": [SDPBackend.EFFICIENT_ATTENTION],
}
# Batch, heads and length of the 1 B model's micro batch at head size 64, and as many numbers at 128.
SHAPES = {"cuda": {64: (8, 16, 2048), 128: (8, 8, 2048)}, "quick": {64: (1, 2, 64), 128: (1, 2, 64)}}


def run(machine: Machine, section: Section) -> None:
    """Report the default's rates beside what the plan assumes, and those of each backend."""
    device, peak = torch.device(machine.device), peak_of(machine)
    for head, (batch, heads, length) in SHAPES["quick" if machine.quick else "cuda"].items():
        sides = [
            torch.randn(batch, heads, length, head, device=device).bfloat16().requires_grad_()
            for _ in range(3)
        ]
        flops = 2 * batch * heads * length**2 * head  # two products, of which half is masked
        for name, choose in {"default": None, **BACKENDS}.items():
            try:
                with _only(choose):
                    forward_s, backward_s = _both_seconds(sides)
            except RuntimeError as error:
                section.add(f"head {head}, {name}", str(error).splitlines()[0][:200], note="not available")
                continue
            rates = flops / forward_s, 2.5 * flops / backward_s
            for phase, rate in zip(("forward", "backward"), rates, strict=True):
                section.add(f"head {head}, {name}, {phase}", rate / 1e12, "TFLOP/s")
                if name == "default":
                    section.expect(
                        "attention", head, phase, rate / peak, f"causal, {batch} x {heads} x {length}"
                    )
        if machine.device == "cuda" and not machine.quick:
            section.add(f"head {head}: kernels of the default", _kernels(partial(_call, sides)))


@contextmanager
def _only(backends: list[SDPBackend] | None) -> Iterator[None]:
    if backends is None:
        yield
        return
    with sdpa_kernel(backends):
        yield


def _call(sides: list[Tensor]) -> Tensor:
    query, key, value = sides
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def _both_seconds(sides: list[Tensor]) -> tuple[float, float]:
    """Return seconds of the forward and of the backward pass."""
    forward_s = seconds_of(lambda: _call(sides))
    output = _call(sides)
    upstream = torch.ones_like(output)
    backward_s = seconds_of(lambda: torch.autograd.grad(output, sides, upstream, retain_graph=True))
    return forward_s, backward_s


def _kernels(call: Callable[[], object]) -> str:
    """Return the names of the kernels that a call launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return ", ".join(event.key[:100] for event in profile.key_averages())
