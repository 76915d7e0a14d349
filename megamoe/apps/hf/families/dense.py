"""Dense models: Llama, Mistral, Qwen2 and Qwen3."""

from megamoe.apps.hf.families.common import (
    DECODER,
    DENSE_FFN,
    HEAD_NORMS,
    NO_WINDOWS,
    RELEASED,
    SHARED_KEYS,
    UNUSED_WINDOW,
    biases,
    groups,
    heads,
    norm_and_rotary,
)
from megamoe.apps.hf.family import Family
from megamoe.apps.hf.keys import fixed, only, same

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
        heads(),
        *norm_and_rotary(1e-6),
        biases("attention_bias", False),
        only("mlp_bias", False, default=False),
    ),
    table=(*DECODER, *DENSE_FFN),
    released={**RELEASED, "pretraining_tp": 1},
)

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    keys=(
        *SHARED_KEYS,
        DENSE,
        FFN,
        fixed(model__attention__query_key_norm="head"),
        groups(32),
        heads(128),
        *norm_and_rotary(1e-6),
        biases("attention_bias", False),
        *UNUSED_WINDOW,
    ),
    table=(*DECODER, *HEAD_NORMS, *DENSE_FFN),
    released={**RELEASED, **NO_WINDOWS},
)

MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    keys=(
        *SHARED_KEYS,
        DENSE,
        FFN,
        groups(8),
        heads(),
        *norm_and_rotary(1e-6),
        same("sliding_window", "model.attention.window", 4096),
    ),
    table=(*DECODER, *DENSE_FFN),
    released=RELEASED,
)

QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    keys=(
        *SHARED_KEYS,
        DENSE,
        FFN,
        fixed(model__attention__input_bias=True, model__attention__output_bias=False),
        groups(32),
        *norm_and_rotary(1e-6),
        *UNUSED_WINDOW,
        only("use_mrope", False, default=False, written=False),
    ),
    table=(*DECODER, *DENSE_FFN),
    released={**RELEASED, **NO_WINDOWS, "use_mrope": False},
)

FAMILIES = (LLAMA, QWEN3, QWEN2, MISTRAL)
