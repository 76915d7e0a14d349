"""DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Flash: latent attention, dense first blocks, shared experts."""

from dataclasses import replace

from megamoe.apps.hf.families import common
from megamoe.apps.hf.families.blocks import dense_first, first_dense, listed_blocks
from megamoe.apps.hf.families.experts import EXPERTS, ROUTER, biased_keys
from megamoe.apps.hf.family import Family
from megamoe.apps.hf.keys import Entry, Json, constant, fixed, ignored, only, same, unsupported
from megamoe.config import RunConfig

LATENT_EPS = 1e-6  # of the norms of compressed states in transformers, whatever rms_norm_eps says


TABLE = (
    *(*common.ENDS, *common.NORMS, *common.LATENT_ATTENTION, *common.DENSE_FFN),
    *(ROUTER, *EXPERTS, *common.SHARED, common.BIAS),
)


def same_heads() -> Entry:
    """Keys of standard attention that latent attention does not read, or that follow from others."""

    def read(given: Json) -> Json:
        groups, heads = given["num_key_value_heads"], given["num_attention_heads"]
        if groups not in (None, heads):
            raise unsupported("num_key_value_heads", groups, [heads])
        return {}

    names = ("num_key_value_heads", "num_attention_heads", "head_dim", "qk_head_dim")
    return Entry(
        dict.fromkeys(names), read, lambda config: {"num_key_value_heads": config.model.num_attention_heads}
    )


def greedy_or_limited() -> Entry:
    """The groups of experts of DeepSeek-V2, which its other method does not read (topk_method)."""
    limit = common.group_limit(None, None, {"score": "max"})

    def read(given: Json) -> Json:
        if given["topk_method"] not in METHODS:
            raise unsupported("topk_method", given["topk_method"], METHODS)
        return limit.read(given) if given["topk_method"] == METHODS[1] else {}

    def write(config: RunConfig) -> Json:
        if not config.moe.router.masks:
            return {"topk_method": METHODS[0], "n_group": 1, "topk_group": 1}
        return {**limit.write(config), "topk_method": METHODS[1]}

    return Entry({**limit.defaults, "topk_method": METHODS[0]}, read, write)


METHODS = ("greedy", "group_limited_greedy")


def latent_keys(
    query_rank: int = 1536, nope: int = 128, value: int = 128, eps: float = 1e-6
) -> tuple[Entry, ...]:
    """Keys of latent attention, norms and rotary positions with the class's defaults."""
    return (
        *common.SHARED_KEYS,
        same("rms_norm_eps", "model.norm_eps", eps),
        fixed(model__latent__norm_eps=LATENT_EPS),
        common.rotary(),
        common.TIED,
        same("q_lora_rank", "model.latent.query_rank", query_rank),
        same("kv_lora_rank", "model.latent.key_value_rank", 512),
        same("qk_nope_head_dim", "model.latent.nope_size", nope),
        same("qk_rope_head_dim", "model.latent.rope_size", 64),
        same("v_head_dim", "model.latent.value_size", value),
        same_heads(),
        only("attention_bias", False, default=False),
        only("mlp_bias", False, default=False, written=False),
        constant("moe_layer_freq", 1),
        # The losses of the original training.
        ignored("aux_loss_alpha", "seq_aux", "router_aux_loss_coef"),
    )


# Constants of released folders. The function needs the way of choosing: other programs take a softmax, and
# no bias, where it is not named.
ROUTING = {"ep_size": 1, "pretraining_tp": 1, "seq_aux": True}

BIASED_NAMES = (
    constant("topk_method", "noaux_tc"),
    constant("scoring_func", "sigmoid"),
    same("rope_interleave", "model.rotary.interleaved", True),
    common.FURTHER_KEY,
)

DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    keys=(
        *latent_keys(),
        *common.TOP_K,
        fixed(
            model__rotary__interleaved=True,
            moe__router__score_function__over="all",
            moe__router__selector__weights="raw",
        ),
        dense_first(0),
        greedy_or_limited(),
        constant("scoring_func", "softmax"),
        only("norm_topk_prob", False, default=False),
        same("routed_scaling_factor", "moe.router.selector.scale", 1.0),
        same("intermediate_size", "model.ffn_hidden_size", 11008),
        same("moe_intermediate_size", "moe.expert_ffn_hidden_size", 1407),
        same("n_routed_experts", "moe.num_experts", 64, alias="num_experts"),
        same("n_shared_experts", "moe.num_shared_experts", 2),
        same("num_experts_per_tok", "moe.router.selector.k"),
    ),
    table=TABLE,
    released={**common.RELEASED, **ROUTING},
)

DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    keys=(
        *latent_keys(),
        dense_first(3),
        *BIASED_NAMES,
        *biased_keys(2048, 256, dense=18432, scale=2.5, limit=(8, 4)),
    ),
    table=TABLE,
    left_out=common.FURTHER_BLOCKS,
    released={**common.RELEASED, **ROUTING, **common.NO_FURTHER},
)

# Released under a name of its own, with DeepSeek-V3's code.
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")


GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    keys=(
        *latent_keys(768, 192, 256, 1e-5),
        listed_blocks(),
        *BIASED_NAMES,
        *biased_keys(1536, 64, dense=10240, chosen=4, scale=1.8),
    ),
    table=TABLE,
    left_out=common.FURTHER_BLOCKS,
    released={
        **common.RELEASED,
        **ROUTING,
        **common.NO_FURTHER,
        "first_k_dense_replace": first_dense,
        "partial_rotary_factor": 1.0,
    },
)

FAMILIES = (DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2, GLM4_MOE_LITE)
