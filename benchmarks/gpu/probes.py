"""Sections `probe_...`: what decides the next changes on a GPU, of a session of half an hour (`gpu-session`).

Each begins with a control, so that sessions on different machines can be compared.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpu.findings import Machine, Section
from gpu.ranks import on_ranks
from gpu.rates import seconds_of
from gpu.training import SMALL, settings_on
from megamoe.kernels.adamw import AdamW
from megamoe.kernels.choice import Kernels
from megamoe.kernels.rms_norm import rms_norm
from megamoe.optim.short_moments import ShortMoments

PARAMETERS, ROWS = 930_000_000, 32_768
KERNELS = Kernels(triton=True)
# Four blocks of OLMoE's size.
OLMOE = (
    *("model.num_layers=4", "model.hidden_size=2048", "model.num_attention_heads=16"),
    *("moe.num_experts=64", "moe.expert_ffn_hidden_size=1024", "moe.router.selector={name: top_k, k: 8}"),
)


def _device(machine: Machine) -> torch.device:
    return torch.device(machine.device, 0) if machine.device == "cuda" else torch.device("cpu")


def _control(machine: Machine, section: Section) -> None:
    """Add a product in bf16 and a copy of the device's memory."""
    size, count = (128, 1 << 16) if machine.quick else (8192, 1 << 28)
    device = _device(machine)
    left = torch.randn(size, size, device=device).bfloat16()
    rate = 2 * size**3 / seconds_of(lambda: left @ left) / 1e12
    section.add(f"control: product of {size}", rate, "TFLOP/s")
    _pass(section, "control: copy", torch.empty(count, device=device).clone, 8 * count)


def _pass(section: Section, name: str, function: Callable[[], object], moved: int) -> None:
    """Add the bandwidth that a pass over so many bytes reaches."""
    section.add(name, moved / seconds_of(function) / 1e9, "GB/s")


def run_adamw(machine: Machine, section: Section) -> None:
    """Update as many parameters as moe_1b has, by PyTorch and by Triton, with moments in fp32 and bf16."""
    _control(machine, section)
    device = _device(machine)
    weight = nn.Parameter(torch.randn(1 << 14 if machine.quick else PARAMETERS, device=device))
    rounded: dict[Tensor, Tensor] = {weight: torch.empty_like(weight, dtype=torch.bfloat16)}
    weight.grad = torch.randn_like(weight)
    for kind, size in ((AdamW, 30), (ShortMoments, 22)):
        for kernels in (Kernels(), KERNELS):
            optimizer = kind([weight], kernels=kernels, fused=True)
            step = partial(optimizer.step, factor=0.5, rounded=rounded)
            name = f"{kind.__name__}, {'Triton' if kernels.triton else 'PyTorch'}, of {size} bytes each"
            _pass(section, name, step, size * weight.numel())


def run_passes(machine: Machine, section: Section) -> None:
    """Measure passes over memory: cast and norm of gradients, RMSNorm, a copy into a third of the columns."""
    _control(machine, section)
    rows = (64 if machine.quick else ROWS, 1024)
    numbers = torch.randn(rows, device=_device(machine))
    short = numbers.bfloat16()
    size = numbers.numel()
    _pass(section, "cast of bf16 to fp32", short.float, 6 * size)
    _pass(section, "norm in fp32", numbers.norm, 4 * size)
    heads = torch.empty(rows[0], 3 * rows[1], device=short.device, dtype=short.dtype)
    _pass(section, "copy into a third of the columns", lambda: heads[:, -rows[1] :].copy_(short), 4 * size)
    leaves = short.clone().requires_grad_(), torch.ones_like(short[0]).requires_grad_()
    normed = rms_norm(*leaves, 1e-5, KERNELS)
    backward = partial(torch.autograd.grad, normed, leaves, short, retain_graph=True)
    _pass(section, "RMSNorm's gradients", backward, 6 * size)


def run_graph(machine: Machine, section: Section) -> None:
    """Capture both passes of a layer in a CUDA graph; replay them on other rows beside eager passes."""
    _control(machine, section)
    width, device = 128 if machine.quick else 4096, _device(machine)
    layer = nn.Linear(width, width, device=device, dtype=torch.bfloat16)
    rows = torch.randn(width, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    section.add("eager, both passes", 1e6 * seconds_of(lambda: layer(rows).sum().backward()), "us")
    if device.type == "cuda":
        replayed: Any = torch.cuda.make_graphed_callables(layer, (rows,))
        section.add("replayed", 1e6 * seconds_of(lambda: replayed(rows).sum().backward()), "us")
        with torch.no_grad():
            other = torch.randn_like(rows)
            same = torch.equal(replayed(other), functional.linear(other, layer.weight, layer.bias))
        section.add("replay on other rows", float(same), holds=same)


def run_fp8(machine: Machine, section: Section) -> None:
    """Measure the cast to FP8, and products in FP8 with a scale for each row where the device has them."""
    _control(machine, section)
    device = _device(machine)
    for size in (128,) if machine.quick else (2048, 8192):
        wide = torch.randn(size, size, device=device).bfloat16()
        short, scale = wide.to(torch.float8_e4m3fn), torch.ones(size, 1, device=device)
        _pass(section, f"cast to FP8, {size}", partial(wide.to, torch.float8_e4m3fn), 3 * size**2)
        multiply = partial(torch._scaled_mm, short, short.t(), scale, scale.t(), out_dtype=torch.bfloat16)
        try:
            section.add(f"FP8, {size}", 2 * size**3 / seconds_of(multiply) / 1e12, "TFLOP/s")
        except (RuntimeError, ValueError) as error:
            section.add(f"FP8, {size}", str(error)[:200])


def run_step(machine: Machine, section: Section, name: str, overrides: tuple[str, ...]) -> None:
    """Time steps of the training section's model with these overrides: free, and with a wait after each."""
    _control(machine, section)
    given = [
        "parallel.expert=1",
        *settings_on(machine, "tuned"),
        *overrides,
        *(SMALL if machine.quick else ()),
    ]
    found = on_ranks(machine, 1, "training", {"overrides": given}, machine.limit(100))
    section.add(f"{name}: step", 1e3 * found["free"], "ms")
    section.add(f"{name}: step with a wait after each", 1e3 * min(found["seconds"]), "ms")
    for kernel, time_ms in found["traced"]["kernels"]:
        section.add(f"{name}: kernel {kernel}", time_ms, "ms")


PROBES: dict[str, Callable[[Machine, Section], None]] = {
    "probe_adamw": run_adamw,
    "probe_passes": run_passes,
    "probe_graph": run_graph,
    "probe_olmoe": partial(run_step, name="four blocks of OLMoE", overrides=OLMOE),
    "probe_fp8": run_fp8,
    "probe_moments": partial(run_step, name="moments in bf16", overrides=("optimizer.moments=bf16",)),
}
