"""Mixtral: every block is an MoE layer without shared experts; softmax over the chosen scores."""

from megamoe.apps.hf.families.common import (
    DECODER,
    LAYER,
    SHARED_KEYS,
    THEIRS,
    groups,
    heads,
    norm_and_rotary,
)
from megamoe.apps.hf.families.routers import EVERY_BLOCK, TOP_K, loss_weight
from megamoe.apps.hf.family import Family
from megamoe.apps.hf.keys import fixed, ignored, same
from megamoe.apps.hf.rules import EXPERT_DOWN, EXPERT_UP, Line, halves, of_each_expert, whole

EXPERTS = f"{THEIRS}block_sparse_moe.experts.{{e}}."

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
    table=(
        *DECODER,
        Line(f"{LAYER}router.scorer.weight", "E H", f"{THEIRS}block_sparse_moe.gate.weight"),
        Line(
            f"{LAYER}experts.up",
            "E 2X H",
            (f"{EXPERTS}w1.weight", f"{EXPERTS}w3.weight"),
            of_each_expert(halves),
            EXPERT_UP,
        ),
        Line(f"{LAYER}experts.down", "E H X", f"{EXPERTS}w2.weight", of_each_expert(whole), EXPERT_DOWN),
    ),
)

FAMILIES = (MIXTRAL,)
