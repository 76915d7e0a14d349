"""Finds the optional accelerators on this machine and decides which of them a run uses."""

import importlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from megamoe.compat.torch_compat import cudnn_problem, has_bf16_products, widen_bf16_products
from megamoe.compat.transformer_engine_compat import OLDEST, is_too_old
from megamoe.config import shapes
from megamoe.config.schema import ModelConfig, RunConfig
from megamoe.kernels.choice import Kernels, has_grouped_product, triton_problem
from megamoe.kernels.library import find_library


@dataclass(frozen=True)
class Availability:
    """The result of a search. version: empty if not found. problem: why it cannot be used, empty if it
    can.
    """

    version: str = ""
    problem: str = ""


def has_cuda() -> bool:
    """Whether PyTorch sees a CUDA device."""
    return torch.cuda.is_available()


@cache
def find_transformer_engine() -> Availability:
    """Find Transformer Engine; it is imported on CUDA only, because its libraries need a matching CUDA and
    PyTorch.
    """
    if not is_installed("transformer_engine"):
        return Availability(problem="Transformer Engine is not installed")
    if not has_cuda():
        return Availability(problem="Transformer Engine is installed, but there is no CUDA device")
    try:
        engine = importlib.import_module("transformer_engine")
        importlib.import_module("transformer_engine.pytorch")
        version = str(engine.__version__)
    except (ImportError, OSError, RuntimeError, AttributeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        return Availability(problem=f"Transformer Engine is installed, but cannot be imported: {reason}")
    if is_too_old(version):
        return Availability(version, f"Transformer Engine {version} is older than {OLDEST}")
    return Availability(version)


@cache
def find_apex_norms() -> Availability:
    """Find NVIDIA's Apex with its compiled norms; PyPI's `apex` is another package without this module."""
    if not (is_installed("apex.normalization") and is_installed("fused_layer_norm_cuda")):
        return Availability(problem="NVIDIA's Apex with its compiled norms is not installed")
    if not has_cuda():
        return Availability(problem="NVIDIA's Apex is installed, but there is no CUDA device")
    return Availability("found")


def is_installed(module: str) -> bool:
    """Whether a module can be found; this imports its parent packages, which may not fit this machine."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, OSError, RuntimeError, SyntaxError, ValueError):
        return False


def uses_transformer_engine(model: ModelConfig) -> bool:
    """Whether model.backend selects Transformer Engine on this machine; auto takes it for FP8 alone.

    In bf16 it has one more wait of the host in each layer, and not our passes over experts and norms.
    """
    if model.backend == "auto":
        return model.fp8 != "none" and not find_transformer_engine().problem
    return model.backend == "transformer_engine"


def uses_apex_norms(model: ModelConfig) -> bool:
    """Whether model.norm_kernel selects Apex on this machine."""
    if model.norm_kernel == "auto":
        return not uses_transformer_engine(model) and not find_apex_norms().problem
    return model.norm_kernel == "apex"


def engine_attends(config: RunConfig) -> bool:
    """Whether the core of attention is Transformer Engine's, where that backend is used.

    Megatron-Core's packed form, which Transformer Engine takes, has one sequence in a micro batch only.
    Windows, sinks and soft caps are always computed by our attention.
    """
    attention = config.model.attention
    varied = attention.window is not None or attention.sinks or attention.soft_cap is not None
    return not (config.data.document_aware or varied or config.model.architecture != "decoder")


def fp8_format(model: ModelConfig) -> Literal["hybrid", "e4m3"] | None:
    """Return the FP8 format (hybrid: gradients have a wider range), or None without FP8."""
    if model.fp8 == "none":
        return None
    return model.fp8_format or ("e4m3" if model.fp8 in ("blockwise", "mxfp8") else "hybrid")


_widened: list[object] = []  # what keeps this process' products in bf16 widened


def widen_products(precision: str, device: torch.device) -> None:
    """In bf16 on a CPU without products in bf16, compute them in fp32 and round once, in this process.

    precision: of the run's weights. A product takes about as long as in fp32, instead of 5 to 120 times.
    """
    if precision == "bf16" and device.type == "cpu" and not has_bf16_products() and not _widened:
        _widened.append(widen_bf16_products())


def backend_rows(config: RunConfig, kernels: Kernels, precision: str = "bf16") -> dict[str, str]:
    """What the start-up summary says: of each accelerator, what this run has from it.

    precision: of the run's weights.
    """
    return {
        "CUDA": _device_row(),
        "CPU kernels": _cpu_kernels_row(config, precision),
        **(_gpu_rows(config, kernels, precision) if has_cuda() else {}),
        "Transformer Engine": _engine_row(config),
        "Apex": "norms" if uses_apex_norms(config.model) else "none",
    }


def _device_row() -> str:
    """Return the device that the run uses, and what is known of one that is not NVIDIA's."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        if problem := cudnn_problem():
            return f"{name}; PyTorch's attention runs without cuDNN: {problem}"
        return name if torch.version.hip is None else f"{name}: AMD, by ROCm; megamoe was never run on one"
    for kind, module in (("Intel GPU (XPU)", torch.xpu), ("Apple GPU (MPS)", torch.backends.mps)):
        if module.is_available():
            return f"none: CPU, gloo; megamoe does not use this machine's {kind}"
    return "none: CPU, gloo"


def _cpu_kernels_row(config: RunConfig, precision: str) -> str:
    if has_cuda():
        return "none: CUDA"
    wide = precision == "bf16" and not has_bf16_products()
    note = "; this processor has no products in bf16: widened to fp32" if wide else ""
    if config.model.cpu_kernels == "plain":
        return f"PyTorch's (model.cpu_kernels: plain){note}"
    library, problem = find_library()
    if library is None:
        return f"PyTorch's: {problem}{note}"
    experts = f", experts by {'AMX' if library.has_tiles else 'PyTorch'}" if precision == "bf16" else ""
    return f"compiled{experts}{note}"


def _gpu_rows(config: RunConfig, kernels: Kernels, precision: str) -> dict[str, str]:
    """Return who computes our own passes on CUDA, and the grouped products of the experts."""
    model, key = config.model, f"model.gpu_kernels: {config.model.gpu_kernels}"
    passes = "MoE rows, norms, rotary positions, loss"
    rows = {"GPU kernels": f"Triton's: {passes}" if kernels.triton else f"PyTorch's ({key})"}
    if model.gpu_kernels == "auto" and triton_problem():
        rows["GPU kernels"] = f"PyTorch's: {triton_problem()}"
    if not shapes.moe_layer_numbers(config):
        return rows
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)
    fast = has_grouped_product(dtype, torch.device("cuda"))
    if uses_transformer_engine(model):
        products = "Transformer Engine's"
    elif kernels.triton and (kernels.triton_products or not fast):
        products = "Triton's"
    else:
        products = "PyTorch's" if fast else f"PyTorch's, which waits for the device and loops in {precision}"
    return {**rows, "experts' products": products}


def _engine_row(config: RunConfig) -> str:
    model, found = config.model, find_transformer_engine()
    if not uses_transformer_engine(model):
        if not is_installed("transformer_engine"):
            return "none"
        why = "torch" if model.backend == "torch" else "auto takes it for FP8 alone"
        return found.problem or f"{found.version}, not used (model.backend: {why})"
    whole = engine_attends(config)
    parts = ["attention" if whole else "linear layers of attention, its core by PyTorch", "norms"]
    if len(shapes.moe_block_numbers(config)) < shapes.num_blocks(config):
        parts.append("dense FFN")
    if shapes.moe_layer_numbers(config):
        parts.append("grouped experts")
    if model.fp8 != "none":
        parts.append(f"fp8 {model.fp8} ({fp8_format(model)})")
    return f"{found.version}: {', '.join(parts)}"
