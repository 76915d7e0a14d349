"""Checks of the model's architecture, its attention, its positions and the places of its MoE layers."""

from collections.abc import Iterator

from megamoe.config.model_schema import LatentConfig, ModelConfig, RotaryConfig
from megamoe.config.schema import RunConfig, StackLayersConfig
from megamoe.config.shapes import Stack, has_input_bias, head_size, stacks
from megamoe.errors import Problem

# The keys that each scaling needs, and those that it may have.
NEEDED = {
    "none": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_length"),
    "llama3": ("factor", "original_length", "low_frequency_factor", "high_frequency_factor"),
}
YARN_ONLY = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
SCALING_KEYS = (*NEEDED["llama3"], *YARN_ONLY)


def size_problems(model: ModelConfig) -> Iterator[Problem]:
    """Yield the problems of the heads' sizes and of the rotary positions, which rotate their columns."""
    heads, groups = model.num_attention_heads, model.num_query_groups
    divides = model.head_size is not None or model.latent is not None or model.hidden_size % heads == 0
    if not divides:
        yield Problem(
            "model.hidden_size", f"{model.hidden_size} does not divide by model.num_attention_heads {heads}"
        )
    if groups is not None and heads % groups:
        yield Problem(
            "model.num_attention_heads", f"{heads} does not divide by model.num_query_groups {groups}"
        )
    if model.latent is not None:
        yield from _latent_problems(model, model.latent)
    if model.position == "rope":
        yield from _scaling_problems(model)
        if model.latent is None and divides:
            yield from _column_problems(model)
    elif model.rotary != RotaryConfig():
        yield Problem(
            "model.rotary",
            f"found keys, but model.position is {model.position}; leave them out, or set it to rope",
        )


def _scaling_problems(model: ModelConfig) -> Iterator[Problem]:
    rotary = model.rotary
    needed = NEEDED[rotary.scaling]
    known = (*needed, *(YARN_ONLY if rotary.scaling == "yarn" else ()))
    for key in SCALING_KEYS:
        value = getattr(rotary, key)
        if value is not None and key not in known:
            yield Problem(
                f"model.rotary.{key}",
                f"found {value}, which scaling {rotary.scaling} does not read; leave it out, or set another",
            )
        if value is None and key in needed:
            yield Problem(f"model.rotary.{key}", f"scaling {rotary.scaling} needs it, found none; give it")
    low, high = rotary.low_frequency_factor, rotary.high_frequency_factor
    if low is not None and high is not None and low >= high:
        yield Problem(
            "model.rotary.low_frequency_factor",
            f"found {low}, expected less than high_frequency_factor {high}",
        )
    if rotary.scaling != "yarn":
        return
    from megamoe.kernels.attention.rotary import YarnScaling  # which imports torch

    fast, slow = rotary.beta_fast or YarnScaling.beta_fast, rotary.beta_slow or YarnScaling.beta_slow
    if fast < slow:
        yield Problem("model.rotary.beta_fast", f"found {fast:g}, expected at least beta_slow {slow:g}")
    if model.rope_base <= 1:
        yield Problem("model.rope_base", f"found {model.rope_base}; scaling yarn needs one above 1")


def _column_problems(model: ModelConfig) -> Iterator[Problem]:
    """Yield the problems of the columns that rotate; the heads' sizes must be whole."""
    size = head_size(model)
    rotary_columns = int(size * model.rotary.share)
    if rotary_columns % 2 == 0 and rotary_columns:
        return
    if rotary_columns < size or not rotary_columns:
        yield Problem(
            "model.rotary.share",
            f"{model.rotary.share} of heads of size {size} is {rotary_columns} columns, expected an even one",
        )
    elif model.head_size is not None:
        yield Problem("model.head_size", f"{model.head_size} is odd; rope needs an even one")
    else:
        yield Problem(
            "model.hidden_size",
            f"{model.hidden_size} over {model.num_attention_heads} heads is {size}; rope needs an even size",
        )


def _latent_problems(model: ModelConfig, latent: LatentConfig) -> Iterator[Problem]:
    attention, groups, needs = model.attention, model.num_query_groups, "latent attention (model.latent)"
    found = {
        "architecture": (model.architecture, model.architecture != "encoder_decoder", "decoder or encoder"),
        "position": (model.position, model.position == "rope", "rope"),
        "head_size": (model.head_size, model.head_size is None, "nope_size and rope_size instead"),
        "num_query_groups": (groups, groups in (None, model.num_attention_heads), "no groups"),
        "attention.query_key_norm": (attention.query_key_norm, attention.query_key_norm == "none", "none"),
        "attention.scale": (attention.scale, attention.scale is None, "its own: null"),
        "rotary.share": (model.rotary.share, model.rotary.share == 1.0, "1, and turns rope_size columns"),
    }
    for key, (value, fits, expected) in found.items():
        if not fits:
            yield Problem(f"model.{key}", f"found {value}, but {needs} needs {expected}; leave one out")
    if has_input_bias(model):
        yield Problem(
            "model.attention.input_bias",
            f"found true (default: model.bias), but {needs} has none; set it to false",
        )
    if latent.rope_size % 2:
        yield Problem("model.latent.rope_size", f"found {latent.rope_size}, expected an even number")


def architecture_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield keys that belong to another architecture, and factors that exclude each other."""
    yield from _variant_problems(config)
    model = config.model
    found = f"found model.architecture {model.architecture}"
    if model.head_transform and model.architecture != "encoder":
        yield Problem("model.head_transform", f"true is for an encoder, {found}; set it to false")
    if model.num_labels is not None and model.architecture != "encoder":
        yield Problem("model.num_labels", f"{model.num_labels} is for an encoder, {found}; leave it out")
    pools = model.pooler or model.pooling != ModelConfig().pooling
    if model.num_labels is not None:
        yield from _label_problems(model, model.num_labels, pools)
    elif pools or model.predicts != ModelConfig().predicts:
        yield Problem(
            "model.pooler, model.pooling, model.predicts",
            "are for labels; give model.num_labels, or leave them out",
        )
    if model.architecture == "encoder_decoder":
        if model.num_query_groups not in (None, model.num_attention_heads):
            yield Problem(
                "model.num_query_groups",
                f"{model.num_query_groups}, but Megatron-Core's cross attention has none; leave it out",
            )
    elif model.encoder_layers is not None:
        yield Problem(
            "model.encoder_layers",
            f"{model.encoder_layers} is for an encoder_decoder, {found}; its blocks are model.num_layers",
        )


def _label_problems(model: ModelConfig, outputs: int, pools: bool) -> Iterator[Problem]:
    """Yield the problems of a head that predicts labels."""
    if model.head_transform:
        yield Problem(
            "model.head_transform",
            "true is for a head that predicts tokens; with model.num_labels take model.pooler instead",
        )
    expected = {"number": 1, "span": 2}.get(model.predicts)
    if outputs < 2 if expected is None else outputs != expected:
        wanted = "at least 2" if expected is None else str(expected)
        yield Problem(
            "model.num_labels", f"found {outputs}, but model.predicts {model.predicts} expects {wanted}"
        )
    if pools and model.predicts in ("tags", "span"):
        yield Problem(
            "model.pooler, model.pooling",
            f"are for what a whole text has, found model.predicts {model.predicts}; leave them out",
        )


def attention_problems(model: ModelConfig) -> Iterator[Problem]:
    """Yield variants of attention that do not fit together, or another architecture."""
    attention = model.attention
    variants = {"window": attention.window, "sinks": attention.sinks, "soft_cap": attention.soft_cap}
    for name, value in variants.items():
        key, found = f"model.attention.{name}", f"found {str(value).lower()}"
        if value and model.architecture != "decoder":
            yield Problem(
                key, f"{found} is for a decoder, but model.architecture is {model.architecture}; leave it out"
            )
        if value and model.attention_dropout:
            yield Problem(
                key, f"{found} beside model.attention_dropout {model.attention_dropout:g}; set that to 0"
            )
    blocks = attention.window_blocks
    if blocks is None:
        return
    key, found = "model.attention.window_blocks", f"found {blocks}"
    if attention.window is None:
        yield Problem(
            key, f"{found}, but model.attention.window is not set; give a window, or leave them out"
        )
    if len({*blocks}) < len(blocks) or not blocks:
        yield Problem(key, f"{found}; expected at least one block, each once, or no such key for all blocks")
    elif max(blocks) > model.num_layers:
        yield Problem(
            key, f"{found}, but the model has {model.num_layers} blocks (model.num_layers; counted from 1)"
        )


def _variant_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield factors that exclude each other, and multi-token prediction with nothing to predict."""
    model = config.model
    depth, key = model.multi_token_prediction.depth, "model.multi_token_prediction.depth"
    if depth and model.architecture != "decoder":
        yield Problem(
            key, f"{depth} is for a decoder, found model.architecture {model.architecture}; set it to 0"
        )
    if depth >= config.data.sequence_length:
        yield Problem(key, f"{depth}, expected less than data.sequence_length {config.data.sequence_length}")
    if model.num_labels is not None and (model.logit_scale != 1 or model.logit_soft_cap is not None):
        yield Problem(
            "model.logit_scale, model.logit_soft_cap",
            "are for a head that predicts tokens; with model.num_labels leave them out",
        )
    if model.scale_embeddings and model.embedding_scale is not None:
        yield Problem(
            "model.embedding_scale",
            f"found {model.embedding_scale:g} beside model.scale_embeddings; leave one of them out",
        )


def position_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield places of MoE layers that the architecture does not have, and blocks that do not exist."""
    layers, two = config.moe.layers, config.model.architecture == "encoder_decoder"
    found = f"model.architecture {config.model.architecture}"
    if two and (layers.every or layers.at or layers.insert_after):
        yield Problem(
            "moe.layers",
            f"{found} has two stacks; give positions under encoder and decoder: {{decoder: {{every: 2}}}}",
        )
    for key, value in (("encoder", layers.encoder), ("decoder", layers.decoder)):
        if value is not None and not two:
            yield Problem(
                f"moe.layers.{key}", f"{found} has one stack; give the positions directly under moe.layers"
            )
    for stack in stacks(config):
        prefix = f"moe.layers.{stack.name}" if two else "moe.layers"
        size = "encoder_layers" if two and stack.name == "encoder" else "num_layers"
        yield from _stack_problems(stack, stack.layers, prefix, f"model.{size}")


def _stack_problems(stack: Stack, layers: StackLayersConfig, prefix: str, size_key: str) -> Iterator[Problem]:
    for key, blocks in (("at", layers.at), ("insert_after", layers.insert_after)):
        if any(block > stack.num_layers for block in blocks):
            yield Problem(
                f"{prefix}.{key}",
                f"block {max(blocks)} does not exist, the model has {stack.num_layers} ({size_key})",
            )
    if layers.every and layers.every > stack.num_layers:
        yield Problem(
            f"{prefix}.every",
            f"{layers.every} is more than {size_key} {stack.num_layers}; a dense model has moe.layers: none",
        )
    twice = set(layers.insert_after) & set(stack.moe_blocks)
    if twice:
        yield Problem(
            f"{prefix}.insert_after",
            f"block {min(twice)} is MoE itself ({prefix}.at or every); insert after another block",
        )
