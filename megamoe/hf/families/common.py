"""Lines and entries that several classes share."""

from typing import Any

from megamoe.config import RunConfig
from megamoe.config.shapes import has_input_bias, head_size
from megamoe.hf.keys import REQUIRED, Entry, Json, fixed, ignored, mapped, only, same, unsupported
from megamoe.hf.rules import (
    COLUMNS,
    GATED,
    ROWS,
    Line,
    halves,
    query_key_value,
)

BLOCK, THEIRS = "model.decoder.layers.{b}.", "model.layers.{b}."
ATTENTION, THEIR_ATTENTION = f"{BLOCK}self_attention.", f"{THEIRS}self_attn."
LAYER = f"{BLOCK}mlp.layer."

ENDS = (
    Line(
        "model.embedding.word_embeddings.weight", "V H", "model.embed_tokens.weight", cut=COLUMNS, blocks="once"
    ),
    Line("model.decoder.final_layernorm.weight", "H", "model.norm.weight", blocks="once"),
    Line(
        "model.output_layer.weight", "V H", "lm_head.weight", cut=COLUMNS, blocks="once", needs="untied"
    ),
)
NORMS = (
    Line(f"{BLOCK}input_layernorm.weight", "H", f"{THEIRS}input_layernorm.weight"),
    Line(f"{BLOCK}pre_mlp_layernorm.weight", "H", f"{THEIRS}post_attention_layernorm.weight"),
)
QUERY_KEY_VALUE = (
    Line(
        f"{ATTENTION}linear_qkv.weight",
        "Q+2K H",
        tuple(f"{THEIR_ATTENTION}{name}_proj.weight" for name in "qkv"),
        query_key_value,
        COLUMNS,
    ),
    Line(f"{ATTENTION}linear_proj.weight", "H Q", f"{THEIR_ATTENTION}o_proj.weight", cut=ROWS),
)
DENSE_FFN = (
    Line(
        f"{BLOCK}mlp.linear_fc1.weight",
        "2F H",
        (f"{THEIRS}mlp.gate_proj.weight", f"{THEIRS}mlp.up_proj.weight"),
        halves,
        GATED,
        blocks="dense",
    ),
    Line(
        f"{BLOCK}mlp.linear_fc2.weight", "H F", f"{THEIRS}mlp.down_proj.weight", cut=ROWS, blocks="dense"
    ),
)
INPUT_BIAS = Line(
    f"{ATTENTION}linear_qkv.bias",
    "Q+2K",
    tuple(f"{THEIR_ATTENTION}{name}_proj.bias" for name in "qkv"),
    query_key_value,
    COLUMNS,
    needs="input bias",
)
OUTPUT_BIAS = Line(
    f"{ATTENTION}linear_proj.bias", "H", f"{THEIR_ATTENTION}o_proj.bias", needs="output bias"
)
HEAD_NORMS = (
    Line(f"{ATTENTION}q_layernorm.weight", "D", f"{THEIR_ATTENTION}q_norm.weight", needs="head norms"),
    Line(f"{ATTENTION}k_layernorm.weight", "D", f"{THEIR_ATTENTION}k_norm.weight", needs="head norms"),
)
WHOLE_NORMS = (
    Line(
        f"{ATTENTION}q_layernorm.weight", "Q", f"{THEIR_ATTENTION}q_norm.weight", needs="whole norms"
    ),
    Line(
        f"{ATTENTION}k_layernorm.weight", "K", f"{THEIR_ATTENTION}k_norm.weight", needs="whole norms"
    ),
)
DECODER = (*ENDS, *NORMS, *QUERY_KEY_VALUE, INPUT_BIAS, OUTPUT_BIAS)

# Every class has RMSNorm before its sub-layers and rotary positions.
SHARED_KEYS = (
    fixed(model__position="rope", model__norm="rmsnorm", model__norm_position="pre", model__bias=False),
    same("hidden_size", "model.hidden_size"),
    same("num_hidden_layers", "model.num_layers"),
    same("num_attention_heads", "model.num_attention_heads"),
    same("vocab_size", "model.vocab_size"),
    mapped("hidden_act", "model.activation", [("silu", "swiglu")], "silu"),
)


def norm_eps(default: float) -> Entry:
    """The norms' epsilon; default: the class's."""
    return same("rms_norm_eps", "model.norm_eps", default)


def tied(default: bool) -> Entry:
    """Whether the output layer has the embedding's weights; default: the class's."""
    return same("tie_word_embeddings", "model.tie_embeddings", default)


def groups(default: int | None = None) -> Entry:
    """The number of heads of keys and values; default: the class's, None: one for each head of queries."""

    def read(given: Json) -> Json:
        return {"model.num_query_groups": given["num_key_value_heads"]}

    def write(config: RunConfig) -> Json:
        return {"num_key_value_heads": config.model.num_query_groups or config.model.num_attention_heads}

    return Entry({"num_key_value_heads": default}, read, write)


def rotary(base: float = 10000.0) -> Entry:
    """The rotary positions, in the form of transformers 5 (rope_parameters) or the earlier one.

    base: the class's default.
    """

    def read(given: Json) -> Json:
        found = _parameters(given, base)
        kind = found.pop("rope_type", "default")
        theta = found.pop("rope_theta")
        if kind != "default":
            raise unsupported("rope_type", kind, ["default"])
        if found.pop("partial_rotary_factor", 1.0) != 1.0 or found:
            raise unsupported("rope_parameters", given["rope_parameters"] or given["rope_scaling"], ["the base alone"])
        if int(theta) != theta:
            raise ValueError(f"rope_theta: found {theta}, expected a whole number")
        return {"model.rope_base": int(theta)}

    def write(config: RunConfig) -> Json:
        return {"rope_parameters": {"rope_theta": float(config.model.rope_base), "rope_type": "default"}}

    return Entry({"rope_parameters": None, "rope_theta": None, "rope_scaling": None}, read, write)


def _parameters(given: Json, base: float) -> dict[str, Any]:
    """Return the parameters of the rotary positions in the form of transformers 5."""
    found = dict(given["rope_parameters"] or given["rope_scaling"] or {})
    if "type" in found:
        found.setdefault("rope_type", found.pop("type"))
    if "rope_theta" not in found:
        found["rope_theta"] = base if given["rope_theta"] is None else given["rope_theta"]
    return found


def heads(default: int | None = None) -> Entry:
    """The size of an attention head; default: the class's, None: the hidden size over the heads."""

    def read(given: Json) -> Json:
        hidden, count = given["hidden_size"], given["num_attention_heads"]
        size = default if given["head_dim"] is None else given["head_dim"]
        return {} if size in (None, hidden / count) else {"model.head_size": size}

    defaults = {"head_dim": default, "hidden_size": REQUIRED, "num_attention_heads": REQUIRED}
    return Entry(defaults, read, lambda config: {"head_dim": head_size(config.model)})


def full_attention() -> Entry:
    """Every block sees all earlier tokens (layer_types)."""

    def read(given: Json) -> Json:
        if set(given["layer_types"] or []) - {"full_attention"}:
            raise unsupported("layer_types", given["layer_types"], ["full_attention"])
        return {}

    return Entry({"layer_types": None}, read, lambda config: {})


def biases(name: str, default: bool, output: bool = True) -> Entry:
    """Whether the projections to queries, keys and values have biases, and with `output` the one after."""

    def read(given: Json) -> Json:
        found = {"model.attention.input_bias": given[name]} if given[name] else {}
        return found | ({"model.attention.output_bias": given[name]} if output and given[name] else {})

    return Entry({name: default}, read, lambda config: {name: has_input_bias(config.model)})


# The window of Qwen's and Mistral's configurations, which no released MoE model uses.
NO_WINDOW = only("sliding_window", None, written=False)
UNUSED_WINDOW = (
    only("use_sliding_window", False, default=False, written=False),
    ignored("sliding_window", "max_window_layers"),
    full_attention(),
)
