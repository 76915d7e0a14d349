"""Finds the optional accelerators on this machine and decides which of them a run uses."""

import importlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from megamoe.compat.torch_compat import has_bf16_products, widen_bf16_products
from megamoe.compat.transformer_engine_compat import FP8_MULTIPLE, OLDEST, fp8_ability, is_too_old
from megamoe.config.schema import ModelConfig, RunConfig
from megamoe.config.shapes import (
    expert_ffn_size,
    ffn_size,
    key_size,
    moe_block_numbers,
    moe_layer_numbers,
    num_blocks,
    query_size,
)
from megamoe.errors import UserError
from megamoe.kernels.choice import Kernels, has_grouped_product, triton_problem
from megamoe.kernels.library import find_library


@dataclass(frozen=True)
class Found:
    """The result of a search. version: empty if not found. problem: why it cannot be used, empty if it
    can.
    """

    version: str = ""
    problem: str = ""


def has_cuda() -> bool:
    """Whether PyTorch sees a CUDA device."""
    return torch.cuda.is_available()


@cache
def find_transformer_engine() -> Found:
    """Find Transformer Engine; it is imported on CUDA only, because its libraries need a matching CUDA and
    PyTorch.
    """
    if not is_installed("transformer_engine"):
        return Found(problem="Transformer Engine is not installed")
    if not has_cuda():
        return Found(problem="Transformer Engine is installed, but there is no CUDA device")
    try:
        engine = importlib.import_module("transformer_engine")
        importlib.import_module("transformer_engine.pytorch")
        version = str(engine.__version__)
    except (ImportError, OSError, RuntimeError, AttributeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        return Found(problem=f"Transformer Engine is installed, but cannot be imported: {reason}")
    if is_too_old(version):
        return Found(version, f"Transformer Engine {version} is older than {OLDEST}")
    return Found(version)


@cache
def find_apex_norms() -> Found:
    """Find NVIDIA's Apex with its compiled norms; PyPI's `apex` is another package without this module."""
    if not (is_installed("apex.normalization") and is_installed("fused_layer_norm_cuda")):
        return Found(problem="NVIDIA's Apex with its compiled norms is not installed")
    if not has_cuda():
        return Found(problem="NVIDIA's Apex is installed, but there is no CUDA device")
    return Found("found")


def is_installed(module: str) -> bool:
    """Whether a module can be found; this imports its parent packages, which may not fit this machine."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, OSError, RuntimeError, SyntaxError, ValueError):
        return False


def uses_transformer_engine(model: ModelConfig) -> bool:
    """Whether model.backend selects Transformer Engine on this machine."""
    if model.backend == "auto":
        return not find_transformer_engine().problem
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


def check_backends(config: RunConfig, precision: str) -> None:
    """Refuse backends that this machine does not have, and FP8 if it cannot be used.

    precision: the resolved one, fp32 or bf16.

    Raises:
        UserError: naming the key, its value and a way out.
    """
    model = config.model
    if model.backend == "transformer_engine" and find_transformer_engine().problem:
        raise UserError(
            f"model.backend: found transformer_engine, but {find_transformer_engine().problem}; install "
            "transformer_engine[pytorch] on a machine with CUDA, or set model.backend: torch"
        )
    if model.norm_kernel == "apex":
        if uses_transformer_engine(model):
            raise UserError(
                "model.norm_kernel: found apex, but Transformer Engine brings norms of its own; set "
                "model.norm_kernel: auto, or model.backend: torch"
            )
        if find_apex_norms().problem:
            raise UserError(
                f"model.norm_kernel: found apex, but {find_apex_norms().problem}; set model.norm_kernel: auto"
            )
    if model.cpu_kernels == "compiled" and find_library()[0] is None:
        raise UserError(
            f"model.cpu_kernels: found compiled, but {find_library()[1]}; or set model.cpu_kernels: auto"
        )
    if model.gpu_kernels == "triton":
        _check_triton()
    _check_fp8_options(model)
    if model.fp8 != "none":
        _check_fp8(model, precision)
        _check_fp8_sizes(config)


def _check_triton() -> None:
    asked = "model.gpu_kernels: found triton"
    if not has_cuda():
        raise UserError(f"{asked}, but there is no CUDA device; set model.gpu_kernels: plain")
    if triton_problem():
        raise UserError(f"{asked}, but {triton_problem()}; install it, or set model.gpu_kernels: plain")


def _check_fp8_options(model: ModelConfig) -> None:
    if model.fp8_format is not None and model.fp8 == "none":
        raise UserError(f"model.fp8_format: found {model.fp8_format}, but model.fp8 is none; leave it out")
    if model.fp8_amax_history is not None and model.fp8 != "delayed":
        raise UserError(
            f"model.fp8_amax_history: found {model.fp8_amax_history}, but model.fp8 is {model.fp8}; only "
            "delayed scaling has a history, leave it out"
        )


def _check_fp8(model: ModelConfig, precision: str) -> None:
    asked = f"model.fp8: found {model.fp8}"
    if not uses_transformer_engine(model):
        why = find_transformer_engine().problem or "model.backend is torch"
        raise UserError(f"{asked}, which needs Transformer Engine, but {why}; set model.fp8: none")
    if precision != "bf16":
        raise UserError(
            f"{asked}, but the precision is {precision}; FP8 products need bf16 weights: take a "
            "DeepSpeed file with bf16 (parallel.deepspeed), or set model.fp8: none"
        )
    able, reason = fp8_ability(model.fp8)
    if not able:
        raise UserError(f"{asked}, but this device cannot: {reason.rstrip('.')}; set another, or none")


def _check_fp8_sizes(config: RunConfig) -> None:
    """Check the sizes of every FP8 product; experts' rows are padded, and the logits are in bf16."""
    model, parallel, unit = config.model, config.parallel, FP8_MULTIPLE[config.model.fp8]
    tokens = config.train.micro_batch_size * config.data.sequence_length
    # (size, the number of ranks that split it)
    sizes = {
        "train.micro_batch_size x data.sequence_length": (
            tokens,
            parallel.tensor if parallel.sequence else 1,
        ),
        "model.hidden_size": (model.hidden_size, parallel.tensor),
        **{key: (size, parallel.tensor) for key, size in _attention_sizes(model).items()},
    }
    if len(moe_block_numbers(config)) < num_blocks(config):
        sizes["model.ffn_hidden_size"] = ffn_size(model), parallel.tensor
    if moe_layer_numbers(config):
        key = "moe.expert_ffn_hidden_size (default: the dense blocks')"
        sizes[key] = expert_ffn_size(config), parallel.expert_tensor
    for key, (size, ranks) in sizes.items():
        if size % (unit * ranks):
            over = f" x {ranks} ranks" if ranks > 1 else ""
            raise UserError(
                f"{key}: {size} is not a multiple of {unit}{over}, which model.fp8: {model.fp8} needs"
            )


def _attention_sizes(model: ModelConfig) -> dict[str, int]:
    """Return the outputs of attention's linear layers, and the input of its last one, by their keys."""
    heads, latent = model.num_attention_heads, model.latent
    if latent is None:
        return {
            "query, key and value together (model.head_size, num_query_groups)": query_size(model)
            + 2 * key_size(model),
            "attention's output (model.head_size x num_attention_heads)": query_size(model),
        }
    sizes = {
        "model.latent.key_value_rank": latent.key_value_rank,
        "model.latent.key_value_rank + rope_size": latent.key_value_rank + latent.rope_size,
        "queries (model.latent.nope_size + rope_size)": heads * (latent.nope_size + latent.rope_size),
        "keys and values (model.latent.nope_size + value_size)": heads
        * (latent.nope_size + latent.value_size),
        "attention's output (model.latent.value_size)": heads * latent.value_size,
    }
    return sizes if latent.query_rank is None else {**sizes, "model.latent.query_rank": latent.query_rank}


_widened: list[object] = []  # what keeps this process' products in bf16 widened


def widen_products(precision: str, device: torch.device) -> None:
    """In bf16 on a CPU without products in bf16, compute them in fp32 and round once, in this process.

    precision: of the run's weights. A product takes about as long as in fp32, instead of 5 to 120 times.
    """
    if precision == "bf16" and device.type == "cpu" and not has_bf16_products() and not _widened:
        _widened.append(widen_bf16_products())


def backend_rows(config: RunConfig, precision: str = "bf16") -> dict[str, str]:
    """What the start-up summary says: of each accelerator, what this run has from it.

    precision: of the run's weights.
    """
    return {
        "CUDA": torch.cuda.get_device_name() if torch.cuda.is_available() else "none: CPU, gloo",
        "CPU kernels": _cpu_kernels_row(config, precision),
        **(_gpu_rows(config, precision) if has_cuda() else {}),
        "Transformer Engine": _engine_row(config),
        "Apex": "norms" if uses_apex_norms(config.model) else "none",
    }


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
    return f"compiled, experts in bf16 by {'AMX' if library.has_tiles else 'PyTorch'}{note}"


def _gpu_rows(config: RunConfig, precision: str) -> dict[str, str]:
    """Return who computes our own passes on CUDA, and the grouped products of the experts."""
    model = config.model
    kernels, key = Kernels.of(model.cpu_kernels, model.gpu_kernels), f"model.gpu_kernels: {model.gpu_kernels}"
    passes = "MoE rows, norms, rotary positions, loss"
    rows = {"GPU kernels": f"Triton's: {passes}" if kernels.triton else f"PyTorch's ({key})"}
    if model.gpu_kernels == "auto" and triton_problem():
        rows["GPU kernels"] = f"PyTorch's: {triton_problem()}"
    if not moe_layer_numbers(config):
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
        return found.problem or f"{found.version}, not used (model.backend: torch)"
    whole = engine_attends(config)
    parts = ["attention" if whole else "linear layers of attention, its core by PyTorch", "norms"]
    if len(moe_block_numbers(config)) < num_blocks(config):
        parts.append("dense FFN")
    if moe_layer_numbers(config):
        parts.append("grouped experts")
    if model.fp8 != "none":
        parts.append(f"fp8 {model.fp8} ({fp8_format(model)})")
    return f"{found.version}: {', '.join(parts)}"
