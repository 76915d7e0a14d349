"""MoE models whose experts are named as in Qwen2-MoE: this, Qwen3-MoE, OLMoE, GLM-4.5, dots.llm1, ERNIE."""

from dataclasses import replace
from typing import Any

from megamoe.apps.hf.families import common
from megamoe.apps.hf.families.blocks import block_range, dense_first, first_dense, listed_blocks, sparse_steps
from megamoe.apps.hf.families.common import HF_LAYER, LAYER
from megamoe.apps.hf.family import Family
from megamoe.apps.hf.keys import NUM_FURTHER, REQUIRED, Entry, constant, fixed, ignored, mapped, only, same
from megamoe.apps.hf.rules import TensorMapping, row
from megamoe.config.shapes import expert_ffn_size, ffn_size, head_size

ROUTER = TensorMapping(f"{LAYER}router.scorer.weight", "E H", f"{HF_LAYER}mlp.gate.weight", blocks="moe")
EXPERTS = common.routed_experts(f"{HF_LAYER}mlp.experts.{{e}}.")
MOE_DECODER = (*common.DECODER, ROUTER, common.BIAS, *EXPERTS, *common.SHARED)


def qwen_keys(dense: int, expert: int, experts: int, chosen: int) -> tuple[Entry, ...]:
    """Keys of Qwen's MoE models with the class's defaults: FFN sizes, experts, and those of a token."""
    return (
        *common.SHARED_KEYS,
        *common.TOP_K,
        sparse_steps(),
        common.normalised(False),
        same("intermediate_size", "model.ffn_hidden_size", dense),
        same("moe_intermediate_size", "moe.expert_ffn_hidden_size", expert),
        same("num_experts", "moe.num_experts", experts, alias="num_local_experts"),
        same("num_experts_per_tok", "moe.router.selector.k", chosen),
        common.loss_weight(0.001),
    )


def biased_keys(
    expert: int,
    experts: Any,
    *,
    dense: int | None = None,
    chosen: Any = 8,
    shared: Any = 1,
    scale: float = 1.0,
    limit: tuple[int, int] = (1, 1),
    sums_to_1: bool = True,
) -> tuple[Entry, ...]:
    """Keys of models like DeepSeek-V3 with the class's defaults: FFN sizes, experts, those of a token.

    dense: None: no block is dense. limit: the groups of experts, and those of a token. sums_to_1: whether the
    weights of a token's experts do.
    """
    return (
        *common.BIASED_TOP_K,
        common.group_limit(*limit, {"score": "sum", "best": 2}),
        common.normalised(sums_to_1),
        same("routed_scaling_factor", "moe.router.selector.scale", scale),
        *(() if dense is None else (same("intermediate_size", "model.ffn_hidden_size", dense),)),
        same("moe_intermediate_size", "moe.expert_ffn_hidden_size", expert),
        same("n_routed_experts", "moe.num_experts", experts, alias="num_local_experts"),
        same("n_shared_experts", "moe.num_shared_experts", shared),
        same("num_experts_per_tok", "moe.router.selector.k", chosen),
    )


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    keys=(
        *qwen_keys(dense=6144, expert=768, experts=128, chosen=8),
        fixed(model__attention__query_key_norm="head"),
        # Of Qwen3-Coder.
        only("use_qk_norm", True, default=True, written=False),
        only("qkv_bias", False, default=False, written=False),
        only("shared_expert_intermediate_size", 0, default=0, written=False),
        *common.attention_keys(4, size=None, bias=False),
        *common.UNUSED_WINDOW,
    ),
    table=MOE_DECODER,
    released={**common.RELEASED_MOE, **common.NO_WINDOWS},
)

OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    keys=(
        *common.SHARED_KEYS,
        *common.TOP_K,
        common.EVERY_BLOCK,
        common.normalised(False),
        same("intermediate_size", "moe.expert_ffn_hidden_size", 2048),
        same("num_experts", "moe.num_experts", 64),
        same("num_experts_per_tok", "moe.router.selector.k", 8),
        common.loss_weight(0.01),
        fixed(model__attention__query_key_norm="whole"),
        *common.attention_keys(eps=1e-5, bias=False),
        only("clip_qkv", None),
    ),
    table=MOE_DECODER,
    released=common.RELEASED_MOE,
)

GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    keys=(
        *common.SHARED_KEYS,
        dense_first(1),
        *biased_keys(1408, 128, dense=10944),
        common.FURTHER_KEY,
        mapped("use_qk_norm", "model.attention.query_key_norm", [(False, "none"), (True, "head")], False),
        ignored("router_aux_loss_coef"),
        *common.attention_keys(8, 1e-5, size=None, bias=False, output=False, share=0.5),
    ),
    table=MOE_DECODER,
    left_out=common.FURTHER_BLOCKS,
    released={**common.RELEASED, **common.ROTARY_SHARE, **common.NO_FURTHER},
)

# GLM-4.5's router in every block, without norms of queries and keys.
SOLAR_OPEN = Family(
    "solar_open",
    "SolarOpenForCausalLM",
    keys=(
        *common.SHARED_KEYS,
        common.EVERY_BLOCK,
        *biased_keys(1280, 128),
        # Of released folders: no block is dense.
        constant("first_k_dense_replace", 0),
        constant("use_qk_norm", False),
        ignored("intermediate_size", "router_aux_loss_coef", NUM_FURTHER),
        *common.attention_keys(8, 1e-5, size=128, bias=False, output=False, base=1e6, share=1.0),
    ),
    table=MOE_DECODER,
    released={
        **common.RELEASED,
        **common.ROTARY_SHARE,
        "intermediate_size": lambda config: ffn_size(config.model),
    },
)

DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM",
    keys=(
        *common.SHARED_KEYS,
        dense_first(0),
        *biased_keys(1408, REQUIRED, dense=10944, chosen=REQUIRED, shared=REQUIRED, sums_to_1=False),
        constant("scoring_func", "noaux_tc", "sigmoid", None),
        constant("topk_method", "noaux_tc", None),
        constant("moe_layer_freq", 1),
        fixed(model__attention__query_key_norm="head"),
        *common.attention_keys(32, size=None, bias=False),
        common.no_last_windows(4096, 62),
        ignored("use_sliding_window"),  # transformers does not read it here
        common.FULL_ATTENTION,
    ),
    table=MOE_DECODER,
    released={**common.RELEASED, **common.NO_WINDOWS},
)

ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    keys=(
        *common.SHARED_KEYS,
        *common.TOP_K,
        fixed(
            model__rotary__interleaved=True,
            moe__router__score_function__bias_update=0.001,
            moe__router__selector__weights="renormalised",
        ),
        block_range(),
        same("intermediate_size", "model.ffn_hidden_size", 12288),
        same("moe_intermediate_size", "moe.expert_ffn_hidden_size", 1536),
        same("moe_num_experts", "moe.num_experts", 64, alias="num_experts"),
        same("moe_num_shared_experts", "moe.num_shared_experts", 2),
        same("moe_k", "moe.router.selector.k", 6, alias="num_experts_per_tok"),
        # The least sum of weights to divide by; here it is 1e-20.
        only("moe_norm_min", 1e-12, default=1e-12, written=False),
        constant("moe_gate", "topk"),
        constant("moe_use_aux_free", True),
        only("use_bias", False, default=False),
        ignored("moe_capacity", "router_aux_loss_coef", NUM_FURTHER),
        *common.attention_keys(
            4, 1e-5, size=None, base=5e5, tied=same("tie_word_embeddings", "model.tie_embeddings", True)
        ),
    ),
    table=(
        *common.DECODER,
        ROUTER,
        replace(common.BIAS, sources=f"{HF_LAYER}mlp.moe_statics.e_score_correction_bias", split=row),
        *EXPERTS,
        *common.SHARED,
    ),
    left_out="model.mtp_",
    released={**common.RELEASED, "head_dim": lambda config: head_size(config.model)},
)

QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    keys=(
        *qwen_keys(dense=5632, expert=1408, experts=60, chosen=4),
        same("shared_expert_intermediate_size", "moe.shared_expert_ffn_hidden_size", 5632),
        fixed(moe__num_shared_experts=1, moe__shared_expert_mode="gated"),
        *common.attention_keys(16),
        common.biases("qkv_bias", True, output=False),
        *common.UNUSED_WINDOW,
    ),
    table=(
        *common.DECODER,
        ROUTER,
        *EXPERTS,
        *common.shared_experts("shared_expert"),
        TensorMapping(
            f"{LAYER}shared.gate", "H", f"{HF_LAYER}mlp.shared_expert_gate.weight", row, blocks="moe"
        ),
    ),
    released={**common.RELEASED_MOE, **common.NO_WINDOWS},
)

# dots.llm1 under other names: each block is listed, and the weights always sum to the scale.
HY_V3 = Family(
    "hy_v3",
    "HYV3ForCausalLM",
    keys=(
        *common.SHARED_KEYS,
        *common.BIASED_TOP_K,
        fixed(moe__router__selector__weights="renormalised", model__attention__query_key_norm="head"),
        listed_blocks(),
        same("router_scaling_factor", "moe.router.selector.scale", 2.826),
        same("intermediate_size", "model.ffn_hidden_size", 13312),
        same("moe_intermediate_size", "moe.expert_ffn_hidden_size", 1536),
        same("num_experts", "moe.num_experts", 192, alias="num_local_experts"),
        same("num_shared_experts", "moe.num_shared_experts", 1),
        same("num_experts_per_tok", "moe.router.selector.k", 8),
        *(constant(name, True) for name in ("qk_norm", "route_norm", "moe_router_use_sigmoid")),
        constant("moe_router_enable_expert_bias", True),
        # In which precision some sums are taken, the experts' size again, multi-token prediction.
        only("enable_moe_fp32_combine", True, False, default=True, written=False),
        ignored("enable_attention_fp32_softmax", "enable_lm_head_fp32"),
        ignored("use_grouped_mm", "expert_hidden_dim", NUM_FURTHER),
        *common.attention_keys(8, 1e-5, size=128, bias=False, base=11158840.0),
        only("mlp_bias", False, default=False),
    ),
    table=(
        *common.DECODER,
        replace(ROUTER, sources=f"{HF_LAYER}mlp.router.gate.weight"),
        replace(common.BIAS, sources=f"{HF_LAYER}mlp.expert_bias"),
        *EXPERTS,
        *common.shared_experts("shared_mlp"),
    ),
    left_out=common.FURTHER_BLOCKS,
    released={
        **common.RELEASED_MOE,
        "first_k_dense_replace": first_dense,
        "expert_hidden_dim": expert_ffn_size,
        **common.NO_FURTHER,
    },
)

FAMILIES = (QWEN2_MOE, QWEN3_MOE, OLMOE, GLM4_MOE, DOTS1, ERNIE4_5_MOE, SOLAR_OPEN, HY_V3)
