"""MoE models whose experts are named as in Qwen2-MoE: Qwen3-MoE, OLMoE."""

from megamoe.hf.families.common import (
    DECODER,
    DENSE_FFN,
    HEAD_NORMS,
    LAYER,
    SHARED_KEYS,
    THEIRS,
    UNUSED_WINDOW,
    WHOLE_NORMS,
    biases,
    groups,
    heads,
    norm_eps,
    rotary,
    tied,
)
from megamoe.hf.families.routers import TOP_K, every_block, loss_weight, normalised, sparse_steps
from megamoe.hf.family import Family
from megamoe.hf.keys import fixed, only, same
from megamoe.hf.rules import EXPERT_DOWN, EXPERT_UP, Line, halves, of_each_expert, whole

EXPERT = f"{THEIRS}mlp.experts.{{e}}."
ROUTER = Line(f"{LAYER}router.scorer.weight", "E H", f"{THEIRS}mlp.gate.weight", blocks="moe")
EXPERTS = (
    Line(
        f"{LAYER}experts.up",
        "E 2X H",
        (f"{EXPERT}gate_proj.weight", f"{EXPERT}up_proj.weight"),
        of_each_expert(halves),
        EXPERT_UP,
        blocks="moe",
    ),
    Line(
        f"{LAYER}experts.down",
        "E H X",
        f"{EXPERT}down_proj.weight",
        of_each_expert(whole),
        EXPERT_DOWN,
        blocks="moe",
    ),
)

QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    keys=(
        *SHARED_KEYS,
        *TOP_K,
        sparse_steps(),
        normalised(False),
        same("intermediate_size", "model.ffn_hidden_size", 6144),
        same("moe_intermediate_size", "moe.expert_ffn_hidden_size", 768),
        same("num_experts", "moe.num_experts", 128, alias="num_local_experts"),
        same("num_experts_per_tok", "moe.router.selector.k", 8),
        loss_weight(0.001),
        fixed(model__attention__query_key_norm="head"),
        groups(4),
        heads(),
        norm_eps(1e-6),
        rotary(),
        tied(False),
        biases("attention_bias", False),
        *UNUSED_WINDOW,
    ),
    table=(*DECODER, *HEAD_NORMS, *DENSE_FFN, ROUTER, *EXPERTS),
)

OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    keys=(
        *SHARED_KEYS,
        *TOP_K,
        every_block(),
        normalised(False),
        same("intermediate_size", "moe.expert_ffn_hidden_size", 2048),
        same("num_experts", "moe.num_experts", 64),
        same("num_experts_per_tok", "moe.router.selector.k", 8),
        loss_weight(0.01),
        fixed(model__attention__query_key_norm="whole"),
        groups(),
        norm_eps(1e-5),
        rotary(),
        tied(False),
        biases("attention_bias", False),
        only("clip_qkv", None),
    ),
    table=(*DECODER, *WHOLE_NORMS, ROUTER, *EXPERTS),
)

FAMILIES = (QWEN3_MOE, OLMOE)
