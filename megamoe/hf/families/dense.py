"""Dense models: Llama."""

from megamoe.hf.families.common import (
    DECODER,
    DENSE_FFN,
    SHARED_KEYS,
    groups,
    head_size,
    norm_eps,
    rotary,
    tied,
)
from megamoe.hf.family import Family
from megamoe.hf.keys import fixed, only, same

DENSE = fixed(moe__layers="none")
FFN = same("intermediate_size", "model.ffn_hidden_size")

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    keys=(
        *SHARED_KEYS,
        DENSE,
        FFN,
        groups(),
        head_size(),
        norm_eps(1e-6),
        rotary(),
        tied(False),
        only("attention_bias", False, default=False),
        only("mlp_bias", False, default=False),
    ),
    table=(*DECODER, *DENSE_FFN),
)

FAMILIES = (LLAMA,)
