"""Section `rates`: matrix products, the experts' grouped product, and copies in memory, on one device."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from common.timers import clock
from gpu.findings import Machine, Section
from megamoe.metrics.gpus import GPUS, Gpu, gpu_of_device
from megamoe.moe.experts.grouped import GroupedExperts

WARM_UP, REPEATS = 3, 10
SIZES = {"cuda": (2048, 4096, 8192), "cpu": (256, 512)}
QUICK_SIZE = 128
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
# Rows, hidden size, FFN size and experts of the grouped product: those of the 1 B model at 16,384 tokens.
GROUPED = {"cuda": (32768, 1024, 1376, 16), "cpu": (1024, 128, 128, 4)}
# Rows, summed size and columns of the 1 B model's products: queries, keys and values; their weight gradient;
# logits; and of larger models.
PRODUCTS = {
    "cuda": (
        (16384, 1024, 3072),
        (3072, 16384, 1024),
        (16384, 1024, 32768),
        (8192, 2048, 8192),
        (8192, 4096, 14336),
    ),
    "quick": ((64, 32, 96), (96, 64, 32)),
}


def run(machine: Machine, section: Section) -> None:
    """Report rates; nothing is required."""
    device = torch.device(machine.device, 0) if machine.device == "cuda" else torch.device("cpu")
    sizes = (QUICK_SIZE,) if machine.quick else SIZES[machine.device]
    for name, dtype, precision in _precisions(device):
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            for size in sizes:
                section.add(f"product, {name}, {size}", _product_rate(size, dtype, device), "TFLOP/s")
        finally:
            torch.set_float32_matmul_precision(before)
    _real_shapes(machine, section, device)
    for dtype in (torch.bfloat16, torch.float32):
        shape = GROUPED["cpu" if machine.quick else machine.device]
        note = "{} rows, hidden {}, FFN {}, {} experts; forward and backward, uneven loads".format(*shape)
        rate = _experts_rate(shape, dtype, device)
        section.add(f"experts, {_short(dtype)}", rate, "TFLOP/s", note=note)
        if dtype == torch.bfloat16:
            section.expect("grouped", min(shape[1:3]), "", 1e12 * rate / peak_of(machine), note)
    copied = COPY_BYTES["cpu"] if machine.quick else COPY_BYTES[machine.device]
    rate = _copy_rate(copied, device)
    section.add("copy in memory", rate, "GB/s", note="bytes read and written")
    section.expect("bytes", 0, "", 1e9 * rate / gpu_of(machine).memory, "a copy")


def _real_shapes(machine: Machine, section: Section, device: torch.device) -> None:
    """Report products of a model's shapes; of equal smallest dimensions, the rate of all together."""
    flops: dict[int, float] = defaultdict(float)
    seconds: dict[int, float] = defaultdict(float)
    for rows, summed, columns in PRODUCTS["quick" if machine.quick else "cuda"]:
        left = torch.randn(rows, summed, device=device).bfloat16()
        right = torch.randn(summed, columns, device=device).bfloat16()
        took, work = seconds_of(partial(torch.mm, left, right)), 2 * rows * summed * columns
        section.add(f"product, bf16, {rows} x {summed} x {columns}", work / took / 1e12, "TFLOP/s")
        flops[min(rows, summed, columns)] += work
        seconds[min(rows, summed, columns)] += took
    for size, all_work in flops.items():
        found = all_work / seconds[size] / peak_of(machine)
        section.expect("matmul", size, "", found, f"products of smallest dimension {size}")


def gpu_of(machine: Machine) -> Gpu:
    """Return this machine's GPU in the table; an H100 for a rehearsal, and for one that is not in it."""
    if machine.quick:
        return GPUS["h100"]
    return gpu_of_device(torch.cuda.get_device_name(0)) or GPUS["h100"]


def peak_of(machine: Machine) -> float:
    """Return the peak FLOP/s in bf16, of which the plan's shares are."""
    return gpu_of(machine).bf16


def _precisions(device: torch.device) -> list[tuple[str, torch.dtype, str]]:
    """Name, dtype and PyTorch's precision of fp32 products."""
    found = [("bf16", torch.bfloat16, "highest"), ("fp32", torch.float32, "highest")]
    if device.type == "cuda":
        found += [("fp16", torch.float16, "highest"), ("TF32", torch.float32, "high")]
    return found


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def seconds_of(call: Callable[[], object]) -> float:
    """Return seconds of one call, the mean of REPEATS after WARM_UP."""
    for _ in range(WARM_UP):
        call()
    begin = clock()
    for _ in range(REPEATS):
        call()
    return (clock() - begin) / REPEATS


def _product_rate(size: int, dtype: torch.dtype, device: torch.device) -> float:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(partial(torch.mm, left, right)) / 1e12


def _experts_rate(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> float:
    rows, hidden, ffn, experts = shape
    module = GroupedExperts(
        hidden, ffn, range(experts), activation="swiglu", std=0.02, output_std=0.02, seed=1, layer=1
    ).to(device, dtype)
    rows_NH = torch.randn(rows, hidden, device=device).to(dtype).requires_grad_()
    upstream_NH = torch.randn_like(rows_NH)
    counts_E = uneven_counts(rows, experts).to(device)

    def both_ways() -> None:
        module(rows_NH, counts_E).backward(upstream_NH)

    # Three matrices of hidden x FFN; a product forward, and two backward for each.
    return 2 * rows * hidden * ffn * 3 * 3 / seconds_of(both_ways) / 1e12


def uneven_counts(rows: int, experts: int) -> Tensor:
    """int64 [experts], summing to `rows`: the first expert has the most, the last has none."""
    share_E = torch.arange(experts - 1, -1, -1, dtype=torch.float64)
    counts_E = (rows * share_E / share_E.sum()).long()
    counts_E[0] += rows - counts_E.sum()
    return counts_E


def _copy_rate(size: int, device: torch.device) -> float:
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(partial(target.copy_, source)) / 1e9
