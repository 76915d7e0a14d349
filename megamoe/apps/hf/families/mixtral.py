"""Mixtral and MiniMax-M2: every block is an MoE layer without shared experts."""

from megamoe.apps.hf.families.common import (
    BIASED_TOP_K,
    DECODER,
    EVERY_BLOCK,
    HF_LAYER,
    LAYER,
    RELEASED_MOE,
    SHARED_KEYS,
    TIED,
    TOP_K,
    WHOLE_NORMS,
    groups,
    heads,
    loss_weight,
    norm_and_rotary,
    rotary,
)
from megamoe.apps.hf.family import Family
from megamoe.apps.hf.keys import Entry, Json, fixed, ignored, only, same, unsupported
from megamoe.apps.hf.rules import EXPERT_DOWN, EXPERT_UP, TensorMapping, halves, of_each_expert, whole
from megamoe.config.shapes import expert_ffn_size, head_size

EXPERTS = f"{HF_LAYER}block_sparse_moe.experts.{{e}}."

EXPERT_LINES = (
    TensorMapping(f"{LAYER}router.scorer.weight", "E H", f"{HF_LAYER}block_sparse_moe.gate.weight"),
    TensorMapping(
        f"{LAYER}experts.up",
        "E 2X H",
        (f"{EXPERTS}w1.weight", f"{EXPERTS}w3.weight"),
        of_each_expert(halves),
        EXPERT_UP,
    ),
    TensorMapping(f"{LAYER}experts.down", "E H X", f"{EXPERTS}w2.weight", of_each_expert(whole), EXPERT_DOWN),
)

# Softmax over the chosen scores.
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    keys=(
        *SHARED_KEYS,
        *TOP_K,
        EVERY_BLOCK,
        fixed(moe__router__selector__weights="renormalised"),
        same("intermediate_size", "moe.expert_ffn_hidden_size"),
        same("num_local_experts", "moe.num_experts", 8, alias="num_experts"),
        same("num_experts_per_tok", "moe.router.selector.k", 2),
        loss_weight(0.001),
        groups(8),
        heads(),
        *norm_and_rotary(1e-5, base=1e6),
        same("sliding_window", "model.attention.window", None),
        ignored("router_jitter_noise"),
    ),
    table=(*DECODER, *EXPERT_LINES),
    released=RELEASED_MOE,
)


def rotary_of_size() -> Entry:
    """The rotary positions, whose share of a head's columns released folders give as a number (rotary_dim).

    An explicit share counts instead, as in transformers.
    """
    by_share = rotary(base=5e6, share=1.0)

    def read(given: Json) -> Json:
        size, share = given["rotary_dim"], given["partial_rotary_factor"]
        if size is not None and share is None:
            given = {**given, "partial_rotary_factor": size / given["head_dim"]}
        return by_share.read(given)

    return Entry({**by_share.defaults, "rotary_dim": None, "head_dim": 128}, read, by_share.write)


def whole_attention() -> Entry:
    """Every block sees all earlier tokens, which is the kind 1 (attn_type_list)."""

    def read(given: Json) -> Json:
        kinds = given["attn_type_list"] or []
        if any(kind != 1 for kind in kinds):
            raise unsupported("attn_type_list", kinds, ["1 for each block"])
        return {}

    return Entry({"attn_type_list": None}, read, lambda config: {})


NORM_FACTORS = ("full_attention", "linear_attention", "mlp")

# Sigmoid of each score, chosen with a bias; norms over all heads.
MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    keys=(
        *SHARED_KEYS,
        *BIASED_TOP_K,
        EVERY_BLOCK,
        fixed(moe__router__selector__weights="renormalised", moe__num_shared_experts=0),
        same("intermediate_size", "moe.expert_ffn_hidden_size", 1536),
        same("num_local_experts", "moe.num_experts", 256, alias="num_experts"),
        same("num_experts_per_tok", "moe.router.selector.k", 8),
        fixed(model__attention__query_key_norm="whole"),
        only("scoring_func", "sigmoid", None, written=False),
        only("use_qk_norm", True, default=True, written=False),
        only("qk_norm_type", "per_layer", None, written=False),
        only("use_routing_bias", True, default=True, written=False),
        whole_attention(),
        # Of released folders: no shared expert, multi-token prediction without weights, and keys that their
        # own code does not read, or at the one value that changes nothing.
        only("shared_intermediate_size", 0, default=0, written=False),
        only("sliding_window", None, written=False),
        *(only(f"layernorm_{part}_beta", 1.0, default=1.0, written=False) for part in NORM_FACTORS),
        ignored("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
        ignored("mlp_intermediate_size", "shared_moe_mode", "max_model_len"),
        loss_weight(0.001),
        groups(8),
        heads(128),
        same("rms_norm_eps", "model.norm_eps", 1e-6),
        rotary_of_size(),
        TIED,
        ignored("router_jitter_noise"),
    ),
    table=(
        *DECODER,
        *WHOLE_NORMS,
        *EXPERT_LINES,
        TensorMapping(
            f"{LAYER}router.score_function.bias",
            "E",
            f"{HF_LAYER}block_sparse_moe.e_score_correction_bias",
            is_buffer=True,
            needs="biased",
        ),
    ),
    released={
        **RELEASED_MOE,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "rotary_dim": lambda config: int(head_size(config.model) * config.model.rotary.share),
        "attn_type_list": lambda config: [1] * config.model.num_layers,
        **{f"layernorm_{part}_beta": 1.0 for part in NORM_FACTORS},
        "router_jitter_noise": 0.0,
        "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid",
        "sliding_window": None,
        "mlp_intermediate_size": expert_ffn_size,  # of dense blocks, which it has not
        "use_mtp": False,
        "num_mtp_modules": 0,
        "mtp_transformer_layers": 0,
    },
)

FAMILIES = (MIXTRAL, MINIMAX_M2)
