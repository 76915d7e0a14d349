"""Checks of the model's architecture, its rotary positions and the positions of its MoE layers."""

from megamoe.config.model_schema import LatentConfig, ModelConfig, RotaryConfig
from megamoe.config.schema import RunConfig, StackLayersConfig
from megamoe.config.shapes import Stack, has_input_bias, head_size, stacks
from megamoe.errors import UserError
from megamoe.kernels.attention.rotary import YarnScaling

# The keys that each scaling needs, and those that it may have.
NEEDED = {
    "none": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_length"),
    "llama3": ("factor", "original_length", "low_frequency_factor", "high_frequency_factor"),
}
YARN_ONLY = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
SCALING_KEYS = (*NEEDED["llama3"], *YARN_ONLY)


def check_rotary(model: ModelConfig) -> None:
    """Refuse rotary positions that nothing reads, that lack a key, or that turn an odd number of columns.

    Raises:
        UserError: naming the key, its value and the way out.
    """
    if model.latent is not None:
        _check_latent(model, model.latent)
    if model.position != "rope":
        if model.rotary != RotaryConfig():
            raise UserError(
                f"model.rotary: found keys, but model.position is {model.position}; leave them out, or set "
                "model.position: rope"
            )
        return
    _check_scaling(model)
    if model.latent is None:
        _check_columns(model)


def _check_scaling(model: ModelConfig) -> None:
    rotary = model.rotary
    needed = NEEDED[rotary.scaling]
    known = (*needed, *(YARN_ONLY if rotary.scaling == "yarn" else ()))
    for key in SCALING_KEYS:
        value = getattr(rotary, key)
        if value is not None and key not in known:
            raise UserError(
                f"model.rotary.{key}: found {value}, which scaling {rotary.scaling} does not read; leave it "
                "out, or set model.rotary.scaling"
            )
        if value is None and key in needed:
            raise UserError(f"model.rotary.{key}: scaling {rotary.scaling} needs it, found none; give it")
    low, high = rotary.low_frequency_factor, rotary.high_frequency_factor
    if low is not None and high is not None and low >= high:
        raise UserError(
            f"model.rotary.low_frequency_factor: found {low}, expected less than high_frequency_factor {high}"
        )
    fast = rotary.beta_fast or YarnScaling.beta_fast
    slow = rotary.beta_slow or YarnScaling.beta_slow
    if rotary.scaling == "yarn" and fast <= slow:
        raise UserError(
            f"model.rotary.beta_fast: found {fast:g}, expected more than beta_slow {slow:g}; a pair that "
            "turns more often than beta_fast keeps its frequency"
        )
    if rotary.scaling == "yarn" and model.rope_base <= 1:
        raise UserError(f"model.rope_base: found {model.rope_base}; scaling yarn needs one above 1")


def _check_columns(model: ModelConfig) -> None:
    size = head_size(model)
    turning = int(size * model.rotary.share)
    if turning == size and size % 2:
        if model.head_size is not None:
            raise UserError(f"model.head_size: {model.head_size} is odd; rope needs an even one")
        raise UserError(
            f"model.hidden_size {model.hidden_size} over {model.num_attention_heads} heads makes heads of "
            f"odd size {size}; rope needs an even one"
        )
    if turning % 2 or turning == 0:
        raise UserError(
            f"model.rotary.share: {model.rotary.share} of heads of size {size} is {turning} columns; "
            "expected an even number above 0"
        )


def _check_latent(model: ModelConfig, latent: LatentConfig) -> None:
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
            raise UserError(f"model.{key}: found {value}, but {needs} needs {expected}; leave one out")
    if has_input_bias(model):
        raise UserError(
            f"model.attention.input_bias (default: model.bias): found true, but {needs} has none; set it to "
            "false"
        )
    if latent.rope_size % 2:
        raise UserError(f"model.latent.rope_size: found {latent.rope_size}, expected an even number")


def check_architecture(config: RunConfig) -> None:
    """Refuse keys that belong to another architecture, and a transform that is not there.

    Raises:
        UserError: naming the key and the way out.
    """
    check_variants(config)
    model, layers = config.model, config.moe.layers
    found = f"model.architecture {model.architecture}"
    if model.head_transform and model.architecture != "encoder":
        raise UserError(f"model.head_transform: true is for an encoder, found {found}; set it to false")
    if model.num_labels is not None and model.architecture != "encoder":
        raise UserError(
            f"model.num_labels: {model.num_labels} is for an encoder, found {found}; leave it out"
        )
    if model.num_labels is not None and model.head_transform:
        raise UserError(
            "model.head_transform: true is for a head that predicts tokens; with model.num_labels set it to "
            "false, or take model.pooler"
        )
    pools = model.pooler or model.pooling != ModelConfig().pooling
    if model.num_labels is None and (pools or model.predicts != ModelConfig().predicts):
        raise UserError(
            "model.pooler, model.pooling, model.predicts: are for labels; give model.num_labels, or leave "
            "them out"
        )
    if model.num_labels is not None:
        _check_outputs(model, model.num_labels, pools)
    if model.architecture == "encoder_decoder":
        if layers.every or layers.at or layers.insert_after:
            raise UserError(
                f"moe.layers: {found} has two stacks; give the positions under moe.layers.encoder and "
                "moe.layers.decoder, such as {decoder: {every: 2}}"
            )
        if model.num_query_groups not in (None, model.num_attention_heads):
            raise UserError(
                f"model.num_query_groups: {model.num_query_groups}, but Megatron-Core's cross attention has "
                "no query groups; leave it out"
            )
        return
    if model.encoder_layers is not None:
        raise UserError(
            f"model.encoder_layers: {model.encoder_layers} is for an encoder_decoder, found {found}; the "
            "blocks of its only stack are model.num_layers"
        )
    for key, value in (("encoder", layers.encoder), ("decoder", layers.decoder)):
        if value is not None:
            raise UserError(
                f"moe.layers.{key}: {found} has one stack; give the positions directly under moe.layers"
            )


def _check_outputs(model: ModelConfig, outputs: int, pools: bool) -> None:
    """Check the number of outputs against what they predict."""
    expected = {"number": 1, "span": 2}.get(model.predicts)
    if outputs < 2 if expected is None else outputs != expected:
        wanted = "at least 2" if expected is None else str(expected)
        raise UserError(
            f"model.num_labels: found {outputs}, but model.predicts {model.predicts} expects {wanted}"
        )
    if pools and model.predicts in ("tags", "span"):
        raise UserError(
            f"model.pooler, model.pooling: are for what a whole text has, found model.predicts "
            f"{model.predicts}; leave them out"
        )


def check_attention(model: ModelConfig) -> None:
    """Refuse variants of attention that do not fit together, or another architecture.

    Raises:
        UserError: naming the key, its value and the way out.
    """
    attention = model.attention
    variants = {"window": attention.window, "sinks": attention.sinks, "soft_cap": attention.soft_cap}
    for key, value in variants.items():
        if not value:
            continue
        asked = f"model.attention.{key}: found {str(value).lower()}"
        if model.architecture != "decoder":
            raise UserError(
                f"{asked}, which is for causal attention of a decoder, but model.architecture is "
                f"{model.architecture}; leave it out"
            )
        if model.attention_dropout:
            raise UserError(
                f"{asked} beside model.attention_dropout {model.attention_dropout:g}, which such attention "
                "does not have; set model.attention_dropout: 0"
            )
    _check_window_blocks(model)


def _check_window_blocks(model: ModelConfig) -> None:
    blocks = model.attention.window_blocks
    if blocks is None:
        return
    asked = f"model.attention.window_blocks: found {blocks}"
    if model.attention.window is None:
        raise UserError(f"{asked}, but model.attention.window is not set; give a window, or leave them out")
    if len({*blocks}) < len(blocks) or not blocks:
        raise UserError(f"{asked}; expected at least one block, each once, or no such key for all blocks")
    if max(blocks) > model.num_layers:
        raise UserError(
            f"{asked}, but the model has {model.num_layers} blocks (model.num_layers; counted from 1)"
        )


def check_variants(config: RunConfig) -> None:
    """Refuse factors that exclude each other, and multi-token prediction where there is nothing to predict.

    Raises:
        UserError: naming the key and the way out.
    """
    model = config.model
    found = f"model.architecture {model.architecture}"
    depth = model.multi_token_prediction.depth
    if depth and model.architecture != "decoder":
        raise UserError(
            f"model.multi_token_prediction.depth: {depth} is for a decoder, found {found}; set it to 0"
        )
    if depth >= config.data.sequence_length:
        raise UserError(
            f"model.multi_token_prediction.depth: {depth} predicts nothing in sequences of "
            f"{config.data.sequence_length} tokens (data.sequence_length); choose a smaller one"
        )
    if model.num_labels is not None and (model.logit_scale != 1 or model.logit_soft_cap is not None):
        raise UserError(
            "model.logit_scale, model.logit_soft_cap: are for a head that predicts tokens; with "
            "model.num_labels leave them out"
        )
    if model.scale_embeddings and model.embedding_scale is not None:
        raise UserError(
            f"model.embedding_scale: found {model.embedding_scale:g} beside model.scale_embeddings, which "
            "multiplies by sqrt(hidden_size); leave one of them out"
        )


def check_positions(config: RunConfig) -> None:
    """Check that the blocks named for MoE layers exist, each once.

    Raises:
        UserError: naming the key, the block and the number of blocks.
    """
    for stack in stacks(config):
        two = config.model.architecture == "encoder_decoder"
        prefix = f"moe.layers.{stack.name}" if two else "moe.layers"
        size = "encoder_layers" if two and stack.name == "encoder" else "num_layers"
        _check_stack(stack, stack.layers, prefix, f"model.{size}")


def _check_stack(stack: Stack, layers: StackLayersConfig, prefix: str, size_key: str) -> None:
    for key, blocks in (("at", layers.at), ("insert_after", layers.insert_after)):
        if any(block > stack.num_layers for block in blocks):
            raise UserError(
                f"{prefix}.{key}: block {max(blocks)} does not exist, the model has "
                f"{stack.num_layers} ({size_key}; blocks are counted from 1)"
            )
    if layers.every and layers.every > stack.num_layers:
        raise UserError(
            f"{prefix}.every: {layers.every} is more than {size_key} {stack.num_layers}, "
            "so no block would be MoE; for a dense model say moe.layers: none"
        )
    twice = set(layers.insert_after) & set(stack.moe_blocks)
    if twice:
        raise UserError(
            f"{prefix}.insert_after: block {min(twice)} is MoE itself ({prefix}.at or every); insert "
            "after another block, or take this one out of those"
        )
