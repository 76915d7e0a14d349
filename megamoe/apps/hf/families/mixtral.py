"""Models with an MoE layer in every block: Mixtral, MiniMax-M2, GraniteMoe, GraniteMoeShared, gpt-oss."""

from dataclasses import replace
from typing import Any

from megamoe.apps.hf.families import common
from megamoe.apps.hf.families.common import ATTENTION, HF_ATTENTION, HF_LAYER, LAYER
from megamoe.apps.hf.family import Family
from megamoe.apps.hf.keys import (
    REQUIRED,
    Entry,
    Json,
    constant,
    converted,
    fixed,
    ignored,
    only,
    same,
    unsupported,
)
from megamoe.apps.hf.rules import (
    COLUMNS,
    EXPERT_BIAS,
    EXPERT_DOWN,
    EXPERT_UP,
    TensorMapping,
    interleaved,
    transposed,
    transposed_interleaved,
)
from megamoe.config import RunConfig
from megamoe.config.shapes import expert_ffn_size, head_size, shared_ffn_size, window_of

MOE = f"{HF_LAYER}block_sparse_moe."
EXPERT_LINES = (
    TensorMapping(f"{LAYER}router.scorer.weight", "E H", f"{MOE}gate.weight"),
    *common.routed_experts(f"{MOE}experts.{{e}}.", ("w1", "w3", "w2"), "all"),
)


def local_keys(
    size: Any, experts: int, chosen: int, alias: str | None = None, top_k: tuple[Entry, ...] = common.TOP_K
) -> tuple[Entry, ...]:
    """Keys of a router in every block with the class's defaults: an expert's FFN size, experts, those of a
    token (alias: another name of this key). top_k: how they are chosen; their weights sum to 1.
    """
    return (
        *common.SHARED_KEYS,
        *top_k,
        fixed(moe__layers__every=1, moe__router__selector__weights="renormalised"),
        same("intermediate_size", "moe.expert_ffn_hidden_size", size),
        same("num_local_experts", "moe.num_experts", experts, alias="num_experts"),
        same("num_experts_per_tok", "moe.router.selector.k", chosen, alias=alias),
        common.loss_weight(0.001),
    )


# Softmax over the chosen scores.
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    keys=(
        *local_keys(REQUIRED, 8, 2),
        *common.attention_keys(8, 1e-5, size=None, base=1e6),
        same("sliding_window", "model.attention.window", None),
        ignored("router_jitter_noise"),
    ),
    table=(*common.DECODER, *EXPERT_LINES),
    released=common.RELEASED_MOE,
)


def rotary_of_size() -> Entry:
    """The rotary positions, whose share of a head's columns released folders give as a number (rotary_dim).

    An explicit share counts instead, as in transformers.
    """
    by_share = common.rotary(base=5e6, share=1.0)

    def read(given: Json) -> Json:
        size, share = given["rotary_dim"], given["partial_rotary_factor"]
        if size is not None and share is None:
            given = {**given, "partial_rotary_factor": size / given["head_dim"]}
        return by_share.read(given)

    return Entry({**by_share.defaults, "rotary_dim": None, "head_dim": 128}, read, by_share.write)


# Sigmoid of each score, chosen with a bias; norms over all heads.
MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    keys=(
        *local_keys(1536, 256, 8, top_k=common.BIASED_TOP_K),
        fixed(model__attention__query_key_norm="whole"),
        constant("scoring_func", "sigmoid", None),
        constant("use_qk_norm", True),
        constant("qk_norm_type", "per_layer", None),
        constant("use_routing_bias", True),
        common.every_block("attn_type_list", 1),
        # Of released folders: no shared expert, multi-token prediction without weights, and keys that their
        # own code does not read, or at the one value that changes nothing.
        constant("shared_intermediate_size", 0),
        constant("sliding_window", None),
        *(constant(f"layernorm_{part}_beta", 1.0) for part in ("full_attention", "linear_attention", "mlp")),
        ignored("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
        ignored("mlp_intermediate_size", "shared_moe_mode", "max_model_len"),
        *common.attention_keys(8, size=128, positions=rotary_of_size()),
        ignored("router_jitter_noise"),
    ),
    table=(*common.DECODER, *EXPERT_LINES, replace(common.BIAS, sources=f"{MOE}e_score_correction_bias")),
    released={
        **common.RELEASED_MOE,
        "rotary_dim": lambda config: int(head_size(config.model) * config.model.rotary.share),
        "attn_type_list": lambda config: [1] * config.model.num_layers,
        "router_jitter_noise": 0.0,
        "shared_moe_mode": "sigmoid",
        "mlp_intermediate_size": expert_ffn_size,  # of dense blocks, which it has not
        "use_mtp": False,
        "num_mtp_modules": 0,
        "mtp_transformer_layers": 0,
    },
)

# Factors on embeddings, residuals, attention and logits; stacked experts.
SHARED_MLP = f"{HF_LAYER}shared_mlp."
DIGITS = 12


# The factor on the embeddings of tokens.
EMBEDDING_FACTOR = converted(
    "embedding_multiplier",
    "model.embedding_scale",
    1.0,
    read=lambda factor: None if factor == 1 else factor,
    write=lambda config: config.model.embedding_scale or 1.0,
)
# The divisor of the logits.
LOGIT_DIVISOR = converted(
    "logits_scaling",
    "model.logit_scale",
    1.0,
    read=lambda divisor: 1 / divisor,
    write=lambda config: round(1 / config.model.logit_scale, DIGITS),
)


def shared_size() -> Entry:
    """The joint FFN size of the shared experts; 0: there are none."""

    def read(given: Json) -> Json:
        size = given["shared_intermediate_size"]
        return {"moe.num_shared_experts": 1, "moe.shared_expert_ffn_hidden_size": size} if size else {}

    def write(config: RunConfig) -> Json:
        return {"shared_intermediate_size": shared_ffn_size(config.moe, expert_ffn_size(config))}

    return Entry({"shared_intermediate_size": 0}, read, write)


GRANITE_KEYS = (
    *local_keys(11008, 8, 2),
    EMBEDDING_FACTOR,
    LOGIT_DIVISOR,
    same("residual_multiplier", "model.residual_scale", 1.0),
    same("attention_multiplier", "model.attention.scale", 1.0),
    *common.attention_keys(bias=False),
)
GRANITE_TABLE = (
    *common.DECODER,
    TensorMapping(f"{LAYER}router.scorer.weight", "E H", f"{MOE}router.layer.weight"),
    TensorMapping(f"{LAYER}experts.up", "E 2X H", f"{MOE}input_linear.weight", cut=EXPERT_UP),
    TensorMapping(f"{LAYER}experts.down", "E H X", f"{MOE}output_linear.weight", cut=EXPERT_DOWN),
)

GRANITE_MOE = Family(
    "granitemoe", "GraniteMoeForCausalLM", GRANITE_KEYS, GRANITE_TABLE, released=common.RELEASED_MOE
)

GRANITE_MOE_SHARED = Family(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    keys=(*GRANITE_KEYS, shared_size()),
    table=(
        *GRANITE_TABLE,
        TensorMapping(f"{LAYER}shared.up", "2S H", f"{SHARED_MLP}input_linear.weight", needs="shared"),
        TensorMapping(f"{LAYER}shared.down", "H S", f"{SHARED_MLP}output_linear.weight", needs="shared"),
    ),
    released=common.RELEASED_MOE,
)

# Attention sinks, windows in some blocks, biases everywhere, a clamped SwiGLU.
STACKED, ROUTER = f"{HF_LAYER}mlp.experts.", f"{HF_LAYER}mlp.router."
WINDOW, WHOLE = "sliding_attention", "full_attention"
DEFAULT_WINDOW = 128


def windows() -> Entry:
    """The window, and the blocks that have it: by default the first, the third, ..."""

    def read(given: Json) -> Json:
        count = given["num_hidden_layers"]
        kinds = given["layer_types"] or [WHOLE if number % 2 else WINDOW for number in range(count)]
        if set(kinds) - {WINDOW, WHOLE} or len(kinds) != count:
            raise unsupported("layer_types", kinds, [f"{count} of {WINDOW} and {WHOLE}"])
        blocks = [number for number, kind in enumerate(kinds, start=1) if kind == WINDOW]
        if not blocks or given["sliding_window"] is None:
            return {}
        return {"model.attention.window": given["sliding_window"], "model.attention.window_blocks": blocks}

    def write(config: RunConfig) -> Json:
        model = config.model
        found = [window_of(model, block + 1) for block in range(model.num_layers)]
        kinds = [WHOLE if window is None else WINDOW for window in found]
        # transformers wants a number even if no block has a window.
        return {"sliding_window": model.attention.window or DEFAULT_WINDOW, "layer_types": kinds}

    defaults = {"sliding_window": DEFAULT_WINDOW, "layer_types": None, "num_hidden_layers": REQUIRED}
    return Entry(defaults, read, write)


# That of the released models' rotary positions.
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    keys=(
        *local_keys(2880, 128, 4, alias="experts_per_token"),
        fixed(
            model__attention__sinks=True,
            moe__router__scorer__bias=True,
            moe__expert_activation="swiglu_clamped",
            moe__expert_bias=True,
        ),
        windows(),
        only("swiglu_limit", 7.0, default=7.0),
        only("swiglu_alpha", 1.702, default=1.702),
        ignored("initial_context_length"),
        *common.attention_keys(8, 1e-5, size=64, bias=True, base=150000.0, default=YARN),
    ),
    table=(
        *common.DECODER,
        TensorMapping(f"{ATTENTION}core_attention.softmax_offset", "N", f"{HF_ATTENTION}sinks", cut=COLUMNS),
        TensorMapping(f"{LAYER}router.scorer.weight", "E H", f"{ROUTER}weight"),
        TensorMapping(f"{LAYER}router.scorer.bias", "E", f"{ROUTER}bias"),
        TensorMapping(
            f"{LAYER}experts.up", "E 2X H", f"{STACKED}gate_up_proj", transposed_interleaved, EXPERT_UP
        ),
        TensorMapping(
            f"{LAYER}experts.up_bias", "E 2X", f"{STACKED}gate_up_proj_bias", interleaved, EXPERT_UP
        ),
        TensorMapping(f"{LAYER}experts.down", "E H X", f"{STACKED}down_proj", transposed, EXPERT_DOWN),
        TensorMapping(f"{LAYER}experts.down_bias", "E H", f"{STACKED}down_proj_bias", cut=EXPERT_BIAS),
    ),
    released={
        **common.RELEASED_MOE,
        "experts_per_token": lambda config: config.moe.router.selector.options.k,
        "initial_context_length": lambda config: (
            config.model.rotary.original_length or config.data.sequence_length
        ),
    },
)

FAMILIES, FURTHER = (MIXTRAL, MINIMAX_M2), (GRANITE_MOE, GRANITE_MOE_SHARED, GPT_OSS)
