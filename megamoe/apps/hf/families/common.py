"""Lines and entries that several classes share: of tensors, positions, routers, the balance loss."""

from typing import Any

from megamoe.apps.hf.keys import (
    ABSENT,
    NUM_FURTHER,
    REQUIRED,
    Entry,
    Json,
    converted,
    fixed,
    ignored,
    mapped,
    only,
    same,
    unsupported,
)
from megamoe.apps.hf.rules import (
    BLOCK,
    COLUMNS,
    EXPERT_DOWN,
    EXPERT_UP,
    GATED,
    ROWS,
    WHOLE,
    Blocks,
    TensorMapping,
    halves,
    of_each_expert,
    query_key_value,
    whole,
)
from megamoe.config import RunConfig
from megamoe.config.shapes import has_input_bias, head_size, moe_layer_numbers
from megamoe.parallel.chunks import Sharding

WORDS = "model.embedding.word_embeddings.weight"
HF_WORDS = "model.embed_tokens.weight"
HEAD = "model.output_layer.weight"
HF_HEAD = "lm_head.weight"
HF_LAYER = "model.layers.{b}."
ATTENTION, HF_ATTENTION = f"{BLOCK}self_attention.", f"{HF_LAYER}self_attn."
LAYER = f"{BLOCK}mlp.layer."

ENDS = (
    TensorMapping(WORDS, "V H", HF_WORDS, cut=COLUMNS, blocks="once"),
    TensorMapping("model.decoder.final_layernorm.weight", "H", "model.norm.weight", blocks="once"),
    TensorMapping(HEAD, "V H", HF_HEAD, cut=COLUMNS, blocks="once", needs="untied"),
)
NORMS = (
    TensorMapping(f"{BLOCK}input_layernorm.weight", "H", f"{HF_LAYER}input_layernorm.weight"),
    TensorMapping(f"{BLOCK}pre_mlp_layernorm.weight", "H", f"{HF_LAYER}post_attention_layernorm.weight"),
)
LINEAR_TOP_K = fixed(
    moe__router__scorer__name="linear",
    moe__router__selector__name="top_k",
    moe__router__capacity__name="none",
)
# softmax over all experts, then the k largest.
TOP_K = (LINEAR_TOP_K, fixed(moe__router__score_function__name="softmax"))
# sigmoid of each score, chosen with a bias that moves against the load (DeepSeek-V3).
BIASED_TOP_K = (
    LINEAR_TOP_K,
    fixed(moe__router__score_function__name="sigmoid", moe__router__score_function__bias_update=0.001),
)
BALANCE = "moe.losses.switch_balance"
EVERY_BLOCK = fixed(moe__layers__every=1)  # has an MoE layer


def qkv(part: str, shape: str, needs: str | None = None) -> TensorMapping:
    """The projections to queries, keys and values; part: `weight` or `bias`."""
    theirs = tuple(f"{HF_ATTENTION}{name}_proj.{part}" for name in "qkv")
    return TensorMapping(
        f"{ATTENTION}linear_qkv.{part}", shape, theirs, query_key_value, COLUMNS, needs=needs
    )


def attention(
    ours: str, shape: str, theirs: str, cut: Sharding = WHOLE, needs: str | None = None
) -> TensorMapping:
    """A weight of attention that both have as it is."""
    return TensorMapping(
        f"{ATTENTION}{ours}.weight", shape, f"{HF_ATTENTION}{theirs}.weight", cut=cut, needs=needs
    )


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")  # the usual names of the three weights of a gated FFN


def routed_experts(
    theirs: str, names: tuple[str, str, str] = PROJECTIONS, blocks: Blocks = "moe"
) -> tuple[TensorMapping, ...]:
    """The routed experts, of which a folder has three weights each; theirs: their module, with {e}."""
    gate, value, down = (f"{theirs}{name}.weight" for name in names)
    return (
        TensorMapping(
            f"{LAYER}experts.up", "E 2X H", (gate, value), of_each_expert(halves), EXPERT_UP, blocks
        ),
        TensorMapping(f"{LAYER}experts.down", "E H X", down, of_each_expert(whole), EXPERT_DOWN, blocks),
    )


def shared_experts(name: str) -> tuple[TensorMapping, ...]:
    """The shared experts, as one FFN; name: that of their module."""
    gate, value, down = (f"{HF_LAYER}mlp.{name}.{each}.weight" for each in PROJECTIONS)
    return (
        TensorMapping(f"{LAYER}shared.up", "2S H", (gate, value), halves, blocks="moe", needs="shared"),
        TensorMapping(f"{LAYER}shared.down", "H S", down, blocks="moe", needs="shared"),
    )


QUERY_KEY_VALUE = (qkv("weight", "Q+2K H"), attention("linear_proj", "H Q", "o_proj", ROWS))
GATE, VALUE, DOWN = (f"{HF_LAYER}mlp.{name}.weight" for name in PROJECTIONS)
DENSE_FFN = (
    TensorMapping(f"{BLOCK}mlp.linear_fc1.weight", "2F H", (GATE, VALUE), halves, GATED, "dense"),
    TensorMapping(f"{BLOCK}mlp.linear_fc2.weight", "H F", DOWN, cut=ROWS, blocks="dense"),
)
INPUT_BIAS = qkv("bias", "Q+2K", needs="input bias")
OUTPUT_BIAS = TensorMapping(
    f"{ATTENTION}linear_proj.bias", "H", f"{HF_ATTENTION}o_proj.bias", needs="output bias"
)
HEAD_NORMS = tuple(attention(f"{side}_layernorm", "D", f"{side}_norm", needs="head norms") for side in "qk")
WHOLE_NORMS = (
    attention("q_layernorm", "Q", "q_norm", needs="whole norms"),
    attention("k_layernorm", "K", "k_norm", needs="whole norms"),
)


SHARED = shared_experts("shared_experts")
BIAS = TensorMapping(
    f"{LAYER}router.score_function.bias",
    "E",
    f"{HF_LAYER}mlp.gate.e_score_correction_bias",
    blocks="moe",
    is_buffer=True,
    needs="biased",
)
LATENT_ATTENTION = (
    attention("linear_q_proj", "Q H", "q_proj", COLUMNS, "whole queries"),
    attention("linear_q_down_proj", "A H", "q_a_proj", COLUMNS, "latent queries"),
    attention("q_layernorm", "A", "q_a_layernorm", needs="latent queries"),
    attention("linear_q_up_proj", "Q A", "q_b_proj", COLUMNS, "latent queries"),
    attention("linear_kv_down_proj", "C+R H", "kv_a_proj_with_mqa", COLUMNS),
    attention("kv_layernorm", "C", "kv_a_layernorm"),
    attention("linear_kv_up_proj", "U C", "kv_b_proj", COLUMNS),
    attention("linear_proj", "H O", "o_proj", ROWS),
)
# Multi-token prediction: the tensors of its blocks, which follow the others and are not read; their number.
FURTHER_BLOCKS = "model.layers.{n}."
FURTHER_KEY = Entry({NUM_FURTHER: None}, lambda given: {}, lambda config: {}, {"num_mtp_layers": NUM_FURTHER})
NO_FURTHER: Json = {NUM_FURTHER: 0}
# What a configuration does not have is left out, see `facts_of`.
DECODER = (
    *(*ENDS, *NORMS, *QUERY_KEY_VALUE, INPUT_BIAS, OUTPUT_BIAS),
    *(*HEAD_NORMS, *WHOLE_NORMS, *DENSE_FFN),
)

# Every class has RMSNorm before its sub-layers and rotary positions.
SHARED_KEYS = (
    fixed(model__position="rope", model__norm="rmsnorm", model__norm_position="pre", model__bias=False),
    same("hidden_size", "model.hidden_size"),
    same("num_hidden_layers", "model.num_layers"),
    same("num_attention_heads", "model.num_attention_heads"),
    same("vocab_size", "model.vocab_size"),
    mapped("hidden_act", "model.activation", [("silu", "swiglu")], "silu"),
    only("is_encoder_decoder", False, default=False, written=False),
)


# Whether the output layer has the embedding's weights.
TIED = same("tie_word_embeddings", "model.tie_embeddings", False)


def rotary(base: float = 10000.0, share: float | None = None, default: Json | None = None) -> Entry:
    """The rotary positions, in the form of transformers 5 (rope_parameters) or the earlier one.

    base: the class's default. share: the class's default of partial_rotary_factor; None: all columns rotate.
    default: of a config.json without a scaling.
    """

    def read(given: Json) -> Json:
        found = _parameters(given, base, default or {})
        kind = found.pop("rope_type", None) or "default"
        tree = {"model.rope_base": found.pop("rope_theta")}
        part = found.pop("partial_rotary_factor", None)
        part = given["partial_rotary_factor"] if part is None else part
        if share is not None:
            tree["model.rotary.share"] = share if part is None else part
        elif part not in (None, 1):
            raise unsupported("partial_rotary_factor", part, [1.0])
        if kind not in SCALINGS:
            raise unsupported("rope_type", kind, list(SCALINGS))
        if kind != "default":
            tree["model.rotary.scaling"] = kind
        if kind in NEED_LENGTH and found.get("original_max_position_embeddings") is None:
            found["original_max_position_embeddings"] = given["max_position_embeddings"]
        for name, value in found.items():
            if name not in SCALINGS[kind]:
                raise ValueError(f"rope_parameters: the key {name} is not known for {kind}")
            if value is not None:
                tree[f"model.rotary.{SCALING_KEYS[name]}"] = value
        return tree

    def write(config: RunConfig) -> Json:
        return {"rope_parameters": {"rope_theta": rope_theta(config), **_scaling(config, share)}}

    names = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")
    return Entry(dict.fromkeys((*names, "max_position_embeddings")), read, write)


# The keys of a scaling that `rope_parameters` may have, by its kind, and ours.
SCALING_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_length",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "attention_factor": "attention_factor",
    "truncate": "truncate",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
}
SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": (*SCALING_KEYS,)[:8],
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
NEED_LENGTH = ("yarn", "llama3")


def rope_theta(config: RunConfig) -> float:
    """Return the base of the rotary positions."""
    return float(config.model.rope_base)


def rope_scaling(config: RunConfig) -> Json | None:
    """Return the scaling of the rotary positions in the form of transformers 4; None: there is none.

    Its kind stands under both names of it. transformers 5 takes this in place of `rope_parameters`.
    """
    scaling = _scaling(config, None)
    return None if scaling["rope_type"] == "default" else {"type": scaling["rope_type"], **scaling}


# What released folders have beside these keys, see `Family.released`.
RELEASED: Json = {
    "attention_dropout": 0.0,
    "initializer_range": lambda config: config.model.init_std,
    "rope_theta": rope_theta,
    "rope_scaling": rope_scaling,
    "use_cache": True,
}
RELEASED_MOE = {**RELEASED, "output_router_logits": False}
NO_WINDOWS: Json = {
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": lambda config: config.model.num_layers,
}
ROTARY_SHARE: Json = {"partial_rotary_factor": lambda config: config.model.rotary.share}


def _scaling(config: RunConfig, share: float | None) -> Json:
    """Return the parameters of the rotary positions but for the base; share: the class's default."""
    rotary = config.model.rotary
    kind = "default" if rotary.scaling == "none" else rotary.scaling
    found: Json = {"rope_type": kind}
    if share not in (None, 1.0) or rotary.share != 1.0:
        found["partial_rotary_factor"] = rotary.share
    values = {name: getattr(rotary, SCALING_KEYS[name]) for name in SCALINGS[kind]}
    return found | {name: value for name, value in values.items() if value is not None}


def _parameters(given: Json, base: float, default: Json) -> dict[str, Any]:
    """Return the parameters of the rotary positions in the form of transformers 5.

    As in transformers, `rope_scaling` replaces `rope_parameters` as a whole.
    """
    known = given["rope_scaling"] or given["rope_parameters"]
    found = dict(default if known is None else known)
    if "type" in found:
        found.setdefault("rope_type", found["type"])
        del found["type"]
    if found.get("rope_theta") is None:
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


def every_block(name: str, kind: Any) -> Entry:
    """A list of the kinds of all blocks, of which one kind has a counterpart."""

    def read(given: Json) -> Json:
        if any(each != kind for each in given[name] or []):
            raise unsupported(name, given[name], [f"{kind} for each block"])
        return {}

    return Entry({name: None}, read, lambda config: {})


FULL_ATTENTION = every_block("layer_types", "full_attention")


def no_last_windows(window: int, first: int) -> Entry:
    """Without layer_types, the blocks from `max_window_layers` on have a window, which is refused.

    window, first: the class's defaults. Written is that no block has one.
    """

    def read(given: Json) -> Json:
        found, last = given["sliding_window"], given["num_hidden_layers"]
        if given["layer_types"] is None and found is not None and last > (given["max_window_layers"] or 0):
            raise unsupported("sliding_window", found, [None])
        return {}

    defaults = {"sliding_window": window, "max_window_layers": first}
    needed = {"layer_types": None, "num_hidden_layers": REQUIRED}
    return Entry({**defaults, **needed}, read, lambda config: {"sliding_window": None})


def biases(name: str, default: bool, output: bool = True) -> Entry:
    """Whether the projections to queries, keys and values have biases, and with `output` the one after."""

    def read(given: Json) -> Json:
        found = {"model.attention.input_bias": given[name]} if given[name] else {}
        return found | ({"model.attention.output_bias": given[name]} if output and given[name] else {})

    return Entry({name: default}, read, lambda config: {name: has_input_bias(config.model)})


def attention_keys(
    groups: int | None = None,
    eps: float = 1e-6,
    *,
    size: Any = ABSENT,
    bias: bool | None = None,
    output: bool = True,
    positions: Entry | None = None,
    tied: Entry = TIED,
    **options: Any,
) -> tuple[Entry, ...]:
    """Keys of standard attention, norms and rotary positions with the class's defaults.

    groups: the heads of keys and values; None: one for each head of queries. eps: of the norms. size: of a
    head, see `heads`; ABSENT: the class has no such key. bias, output: see `biases`; None: no such key.
    positions: in place of `rotary` with its options.
    """
    return (
        same("num_key_value_heads", "model.num_query_groups", groups),
        *(() if size is ABSENT else (heads(size),)),
        same("rms_norm_eps", "model.norm_eps", eps),
        positions or rotary(**options),
        tied,
        *(() if bias is None else (biases("attention_bias", bias, output),)),
    )


# The window of Qwen's configurations, which no released MoE model uses.
UNUSED_WINDOW = (
    only("use_sliding_window", False, default=False, written=False),
    ignored("sliding_window", "max_window_layers"),
    FULL_ATTENTION,
)


def loss_weight(default: float) -> Entry:
    """The weight of the balance loss, which counts as in transformers (sum_of_f, over_layers); default: the
    class's.
    """
    name = "router_aux_loss_coef"

    def read(given: Json) -> Json:
        weight = float(given[name])
        if not weight >= 0:
            raise unsupported(name, given[name], ["a number of at least 0"])
        loss = {"weight": weight, "over_layers": "mean", "sum_of_f": "k"}
        return {BALANCE: loss} if weight else {"moe.losses": {}}

    def write(config: RunConfig) -> Json:
        loss = config.moe.losses.get(BALANCE.rpartition(".")[2])
        if loss is None:
            return {name: 0.0}
        layers = 1 if loss.options.over_layers == "mean" else len(moe_layer_numbers(config))
        k = 1 if loss.options.sum_of_f == "k" else getattr(config.moe.router.selector.options, "k", 1)
        return {name: float(loss.options.weight) * layers / k}

    return Entry({name: default}, read, write)


def normalised(default: bool) -> Entry:
    """Whether the weights of the chosen experts sum to 1 (norm_topk_prob)."""
    return converted(
        "norm_topk_prob",
        "moe.router.selector.weights",
        default,
        read=lambda sums_to_1: "renormalised" if sums_to_1 else "raw",
        write=lambda config: getattr(config.moe.router.selector.options, "weights", "raw") != "raw",
    )


def group_limit(groups: int | None, kept: int | None, score: Json) -> Entry:
    """Experts of few groups for each token (n_group, topk_group); groups, kept: the class's defaults.

    score: the options of the mask that say how groups are compared.
    """

    def read(given: Json) -> Json:
        count, keep = given["n_group"], given["topk_group"]
        if count in (None, 1) or count == keep:
            return {"moe.router.masks": []}
        return {"moe.router.masks": [{"name": "group_limit", "num_groups": count, "keep": keep, **score}]}

    def write(config: RunConfig) -> Json:
        masks = config.moe.router.masks
        options = masks[0].options if masks else None
        return {"n_group": getattr(options, "num_groups", 1), "topk_group": getattr(options, "keep", 1)}

    return Entry({"n_group": groups, "topk_group": kept}, read, write)
