"""Checks of the accelerators that a configuration names against this machine, and of the sizes of FP8."""

from collections.abc import Iterator

from megamoe.compat.transformer_engine_compat import fp8_ability
from megamoe.config import shapes
from megamoe.config.layer_kinds import kinds
from megamoe.config.schema import ModelConfig, RunConfig
from megamoe.errors import Problem
from megamoe.kernels.library import find_library
from megamoe.model import backends


def backend_problems(config: RunConfig, precision: str | None) -> Iterator[Problem]:
    """Yield backends that this machine does not have, and why FP8 cannot be used.

    precision: of the weights, `fp32`, `bf16` or `fp16`; None: not known.
    """
    model = config.model
    if model.backend == "transformer_engine" and (engine := backends.find_transformer_engine().problem):
        yield Problem(
            "model.backend",
            f"found transformer_engine, but {engine}; install it on a machine with CUDA, or set torch",
        )
    if model.norm_kernel == "apex" and backends.uses_transformer_engine(model):
        yield Problem(
            "model.norm_kernel",
            "found apex, but Transformer Engine has its own norms; set it to auto, or model.backend: torch",
        )
    elif model.norm_kernel == "apex" and (apex := backends.find_apex_norms().problem):
        yield Problem("model.norm_kernel", f"found apex, but {apex}; set model.norm_kernel: auto")
    if model.cpu_kernels == "compiled" and find_library()[0] is None:
        yield Problem(
            "model.cpu_kernels", f"found compiled, but {find_library()[1]}; or set model.cpu_kernels: auto"
        )
    if model.gpu_kernels == "triton" and not backends.has_cuda():
        yield Problem(
            "model.gpu_kernels", "found triton, but there is no CUDA device; set model.gpu_kernels: plain"
        )
    elif model.gpu_kernels == "triton" and backends.triton_problem():
        yield Problem(
            "model.gpu_kernels",
            f"found triton, but {backends.triton_problem()}; install it, or set model.gpu_kernels: plain",
        )
    if model.fp8_format is not None and model.fp8 == "none":
        yield Problem("model.fp8_format", f"found {model.fp8_format}, but model.fp8 is none; leave it out")
    if model.fp8_amax_history is not None and model.fp8 != "delayed":
        yield Problem(
            "model.fp8_amax_history",
            f"found {model.fp8_amax_history}, which is for delayed scaling, but model.fp8 is {model.fp8}",
        )
    if model.fp8 != "none":
        yield from _fp8_problems(model, precision)
        yield from _fp8_size_problems(config)


def _fp8_problems(model: ModelConfig, precision: str | None) -> Iterator[Problem]:
    key, found = "model.fp8", f"found {model.fp8}"
    if not backends.uses_transformer_engine(model):
        why = backends.find_transformer_engine().problem or "model.backend is torch"
        yield Problem(key, f"{found}, which needs Transformer Engine, but {why}; set model.fp8: none")
        return
    if precision not in ("bf16", None):
        yield Problem(
            key,
            f"{found}, but the precision is {precision}; FP8 products need bf16 weights: take a DeepSpeed "
            "file with bf16 (parallel.deepspeed), or set model.fp8: none",
        )
    able, reason = fp8_ability(model.fp8)
    if not able:
        yield Problem(key, f"{found}, but this device cannot: {reason.rstrip('.')}; set another, or none")


def _fp8_size_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the sizes of FP8 products that do not fit; experts' rows are padded, and logits are in bf16."""
    model, parallel, unit = config.model, config.parallel, shapes.FP8_MULTIPLE[config.model.fp8]
    tokens = config.train.micro_batch_size * config.data.sequence_length
    # (size, the number of ranks that split it)
    of_tokens = parallel.context * (parallel.tensor if parallel.sequence else 1)
    sizes = {
        "train.micro_batch_size x data.sequence_length": (tokens, of_tokens),
        "model.hidden_size": (model.hidden_size, parallel.tensor),
        **{key: (size, parallel.tensor) for key, size in _attention_sizes(model).items()},
    }
    if len(shapes.moe_block_numbers(config)) < shapes.num_blocks(config):
        sizes["model.ffn_hidden_size"] = shapes.ffn_size(model), parallel.tensor
    if shapes.moe_layer_numbers(config):
        for kind in kinds(config):
            key = f"{kind.place('moe.expert_ffn_hidden_size')} (default: the dense blocks')"
            sizes[key] = shapes.expert_ffn_size(kind.config), parallel.expert_tensor
    for key, (size, ranks) in sizes.items():
        if size % (unit * ranks):
            over = f" x {ranks} ranks" if ranks > 1 else ""
            yield Problem(
                key, f"{size} is not a multiple of {unit}{over}, which model.fp8: {model.fp8} needs"
            )


def _attention_sizes(model: ModelConfig) -> dict[str, int]:
    """Return the outputs of attention's linear layers, and the input of its last one, by their keys."""
    heads, latent = model.num_attention_heads, model.latent
    if latent is None:
        inputs = shapes.query_size(model) + 2 * shapes.key_size(model)
        return {
            "query, key and value together (model.head_size, num_query_groups)": inputs,
            "attention's output (model.head_size x num_attention_heads)": shapes.query_size(model),
        }
    key_values = heads * (latent.nope_size + latent.value_size)
    sizes = {
        "model.latent.key_value_rank": latent.key_value_rank,
        "model.latent.key_value_rank + rope_size": latent.key_value_rank + latent.rope_size,
        "queries (model.latent.nope_size + rope_size)": heads * (latent.nope_size + latent.rope_size),
        "keys and values (model.latent.nope_size + value_size)": key_values,
        "attention's output (model.latent.value_size)": heads * latent.value_size,
    }
    return sizes if latent.query_rank is None else {**sizes, "model.latent.query_rank": latent.query_rank}
