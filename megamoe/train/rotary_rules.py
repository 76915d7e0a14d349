"""Checks of rotary positions and of multi-head latent attention."""

from megamoe.config.model_schema import LatentConfig, ModelConfig, RotaryConfig
from megamoe.config.shapes import has_input_bias, head_size
from megamoe.errors import UserError
from megamoe.kernels.attention.rotary_scaling import YarnScaling

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
