"""Dense models: Llama, Mistral, Qwen2 and Qwen3."""

from megamoe.apps.hf.families import common
from megamoe.apps.hf.family import Family
from megamoe.apps.hf.keys import fixed, only, same

DENSE = (*common.SHARED_KEYS, fixed(moe__layers="none"), same("intermediate_size", "model.ffn_hidden_size"))

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    keys=(*DENSE, *common.attention_keys(size=None, bias=False), only("mlp_bias", False, default=False)),
    table=common.DECODER,
    released={**common.RELEASED, "pretraining_tp": 1},
)

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    keys=(
        *DENSE,
        fixed(model__attention__query_key_norm="head"),
        *common.attention_keys(32, size=128, bias=False),
        *common.UNUSED_WINDOW,
    ),
    table=common.DECODER,
    released={**common.RELEASED, **common.NO_WINDOWS},
)

MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    keys=(
        *DENSE,
        *common.attention_keys(8, size=None),
        same("sliding_window", "model.attention.window", 4096),
    ),
    table=common.DECODER,
    released=common.RELEASED,
)

QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    keys=(
        *DENSE,
        fixed(model__attention__input_bias=True, model__attention__output_bias=False),
        *common.attention_keys(32),
        *common.UNUSED_WINDOW,
        only("use_mrope", False, default=False, written=False),
    ),
    table=common.DECODER,
    released={**common.RELEASED, **common.NO_WINDOWS, "use_mrope": False},
)

FAMILIES = (LLAMA, QWEN3, QWEN2, MISTRAL)
