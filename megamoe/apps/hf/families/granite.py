"""GraniteMoe, GraniteMoeShared: factors on embeddings, residuals, attention, logits; stacked experts."""

from megamoe.apps.hf.families.common import (
    DECODER,
    EVERY_BLOCK,
    HF_LAYER,
    LAYER,
    RELEASED_MOE,
    SHARED_KEYS,
    TOP_K,
    biases,
    groups,
    loss_weight,
    norm_and_rotary,
)
from megamoe.apps.hf.family import Family
from megamoe.apps.hf.keys import Entry, Json, converted, fixed, same
from megamoe.apps.hf.rules import EXPERT_DOWN, EXPERT_UP, TensorMapping
from megamoe.config import RunConfig
from megamoe.config.shapes import expert_ffn_size, head_size, shared_ffn_size

MOE, SHARED_MLP = f"{HF_LAYER}block_sparse_moe.", f"{HF_LAYER}shared_mlp."
DIGITS = 12


# The factor on the embeddings of tokens.
EMBEDDING = converted(
    "embedding_multiplier",
    "model.embedding_scale",
    1.0,
    read=lambda factor: None if factor == 1 else factor,
    write=lambda config: config.model.embedding_scale or 1.0,
)
# The factor on the attention logits.
ATTENTION = converted(
    "attention_multiplier",
    "model.attention.scale",
    1.0,
    read=lambda factor: factor,
    write=lambda config: config.model.attention.scale or head_size(config.model) ** -0.5,
)
# The divisor of the logits.
LOGITS = converted(
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
        if not size:
            return {"moe.num_shared_experts": 0}
        return {"moe.num_shared_experts": 1, "moe.shared_expert_ffn_hidden_size": size}

    def write(config: RunConfig) -> Json:
        return {"shared_intermediate_size": shared_ffn_size(config.moe, expert_ffn_size(config))}

    return Entry({"shared_intermediate_size": 0}, read, write)


KEYS = (
    *SHARED_KEYS,
    *TOP_K,
    EVERY_BLOCK,
    fixed(moe__router__selector__weights="renormalised"),
    same("intermediate_size", "moe.expert_ffn_hidden_size", 11008),
    same("num_local_experts", "moe.num_experts", 8, alias="num_experts"),
    same("num_experts_per_tok", "moe.router.selector.k", 2),
    loss_weight(0.001),
    EMBEDDING,
    LOGITS,
    same("residual_multiplier", "model.residual_scale", 1.0),
    ATTENTION,
    groups(),
    *norm_and_rotary(1e-6),
    biases("attention_bias", False),
)
TABLE = (
    *DECODER,
    TensorMapping(f"{LAYER}router.scorer.weight", "E H", f"{MOE}router.layer.weight"),
    TensorMapping(f"{LAYER}experts.up", "E 2X H", f"{MOE}input_linear.weight", cut=EXPERT_UP),
    TensorMapping(f"{LAYER}experts.down", "E H X", f"{MOE}output_linear.weight", cut=EXPERT_DOWN),
)

GRANITE_MOE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    keys=(*KEYS, fixed(moe__num_shared_experts=0)),
    table=TABLE,
    released=RELEASED_MOE,
)

GRANITE_MOE_SHARED = Family(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    keys=(*KEYS, shared_size()),
    table=(
        *TABLE,
        TensorMapping(f"{LAYER}shared.up", "2S H", f"{SHARED_MLP}input_linear.weight", needs="shared"),
        TensorMapping(f"{LAYER}shared.down", "H S", f"{SHARED_MLP}output_linear.weight", needs="shared"),
    ),
    released=RELEASED_MOE,
)

FAMILIES = (GRANITE_MOE, GRANITE_MOE_SHARED)
