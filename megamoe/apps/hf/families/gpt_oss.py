"""gpt-oss: attention sinks, windows in some blocks, biases everywhere, a clamped SwiGLU."""

from megamoe.apps.hf.families.common import (
    ATTENTION,
    DECODER,
    EVERY_BLOCK,
    HF_ATTENTION,
    HF_LAYER,
    LAYER,
    RELEASED_MOE,
    SHARED_KEYS,
    TOP_K,
    biases,
    groups,
    heads,
    loss_weight,
    norm_and_rotary,
)
from megamoe.apps.hf.family import Family
from megamoe.apps.hf.keys import REQUIRED, Entry, Json, fixed, ignored, only, same, unsupported
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
from megamoe.config.shapes import window_of

EXPERTS, ROUTER = f"{HF_LAYER}mlp.experts.", f"{HF_LAYER}mlp.router."
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
        *SHARED_KEYS,
        *TOP_K,
        EVERY_BLOCK,
        fixed(
            model__attention__sinks=True,
            moe__router__selector__weights="renormalised",
            moe__router__scorer__bias=True,
            moe__expert_activation="swiglu_clamped",
            moe__expert_bias=True,
        ),
        windows(),
        same("intermediate_size", "moe.expert_ffn_hidden_size", 2880),
        same("num_local_experts", "moe.num_experts", 128, alias="num_experts"),
        same("num_experts_per_tok", "moe.router.selector.k", 4, alias="experts_per_token"),
        only("swiglu_limit", 7.0, default=7.0),
        only("swiglu_alpha", 1.702, default=1.702),
        ignored("initial_context_length"),
        loss_weight(0.001),
        groups(8),
        heads(64),
        *norm_and_rotary(1e-5, base=150000.0, default=YARN),
        biases("attention_bias", True),
    ),
    table=(
        *DECODER,
        TensorMapping(f"{ATTENTION}core_attention.softmax_offset", "N", f"{HF_ATTENTION}sinks", cut=COLUMNS),
        TensorMapping(f"{LAYER}router.scorer.weight", "E H", f"{ROUTER}weight"),
        TensorMapping(f"{LAYER}router.scorer.bias", "E", f"{ROUTER}bias"),
        TensorMapping(
            f"{LAYER}experts.up", "E 2X H", f"{EXPERTS}gate_up_proj", transposed_interleaved, EXPERT_UP
        ),
        TensorMapping(
            f"{LAYER}experts.up_bias", "E 2X", f"{EXPERTS}gate_up_proj_bias", interleaved, EXPERT_UP
        ),
        TensorMapping(f"{LAYER}experts.down", "E H X", f"{EXPERTS}down_proj", transposed, EXPERT_DOWN),
        TensorMapping(f"{LAYER}experts.down_bias", "E H", f"{EXPERTS}down_proj_bias", cut=EXPERT_BIAS),
    ),
    released={
        **RELEASED_MOE,
        "experts_per_token": lambda config: config.moe.router.selector.options.k,
        "initial_context_length": lambda config: (
            config.model.rotary.original_length or config.data.sequence_length
        ),
    },
)

FAMILIES = (GPT_OSS,)
