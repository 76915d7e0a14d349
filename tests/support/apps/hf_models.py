"""Small random models of transformers, of each class that can be converted, in folders as it saves them."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

WORDS = 48
TEXT = "The river runs to the sea, and the sea runs to no one. " * 20
LENGTH = 64
SHAPE: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2 * LENGTH,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
OTHER = {
    **SHAPE,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
NO_LOSS = {"router_aux_loss_coef": 0.0}
FOUR_LOCAL = {**NO_LOSS, "num_local_experts": 4, "intermediate_size": 16}
SIX_LOCAL = {**NO_LOSS, "num_local_experts": 6, "intermediate_size": 8}
GRANITE = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 1.5,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
}
EXPERTS = {**NO_LOSS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "intermediate_size": 40,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
LATENT = {
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    }
}
ALL_HEADS = {**SHAPE, "num_key_value_heads": 4, "rms_norm_eps": 1e-6}
ERNIE = {
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "moe_num_experts": 4,
    "moe_num_shared_experts": 2,
    "moe_k": 3,
}
ROUTED_LITE = {name: value for name, value in ROUTED.items() if name != "first_k_dense_replace"}
SOLAR = {name: value for name, value in ROUTED_LITE.items() if name != "intermediate_size"}
HY = {
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "intermediate_size": 40,
    "router_scaling_factor": 1.5,
}
LITE = {**SHAPE, **ROUTED_LITE}
# Two configurations of each class: the first has grouped queries and an output layer of its own, the second
# has neither.
CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": (
        "LlamaConfig",
        {**SHAPE, **ROPE, "intermediate_size": 40, "attention_bias": True},
        {**OTHER, "intermediate_size": 20},
    ),
    "qwen3": (
        "Qwen3Config",
        {**SHAPE, **ROPE, "intermediate_size": 40, "head_dim": 12},
        {**OTHER, "intermediate_size": 20, "head_dim": 4, "attention_bias": True},
    ),
    "qwen2": ("Qwen2Config", {**SHAPE, **ROPE, "intermediate_size": 40}, {**OTHER, "intermediate_size": 20}),
    "mistral": (
        "MistralConfig",
        {**SHAPE, **ROPE, "intermediate_size": 40, "head_dim": 12, "sliding_window": 10},
        {**OTHER, "intermediate_size": 20, "sliding_window": None},
    ),
    "mixtral": (
        "MixtralConfig",
        {**SHAPE, **FOUR_LOCAL},
        {**OTHER, **ROPE, **SIX_LOCAL, "num_experts_per_tok": 3},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**SHAPE, **EXPERTS, "intermediate_size": 40, "head_dim": 12, "norm_topk_prob": True},
        {**OTHER, **EXPERTS, "intermediate_size": 20, "head_dim": 4, "mlp_only_layers": [1]},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**SHAPE, **EXPERTS, "intermediate_size": 40, "shared_expert_intermediate_size": 24},
        {
            **OTHER,
            **EXPERTS,
            "intermediate_size": 20,
            "shared_expert_intermediate_size": 8,
            "decoder_sparse_step": 2,
            "qkv_bias": False,
        },
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        {**SHAPE, **FOUR_LOCAL, **GRANITE},
        {**OTHER, **SIX_LOCAL, "attention_bias": True},
    ),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        {**SHAPE, **FOUR_LOCAL, "shared_intermediate_size": 24, **GRANITE},
        {**OTHER, **SIX_LOCAL, "attention_bias": True},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**SHAPE, **FOUR_LOCAL, "num_experts_per_tok": 2, "head_dim": 12, "sliding_window": 10},
        {
            **OTHER,
            **ROPE,
            **SIX_LOCAL,
            "head_dim": 4,
            "sliding_window": 7,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "attention_bias": False,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {**SHAPE, **ROUTED, "head_dim": 8, "use_qk_norm": True, "attention_bias": True},
        {**OTHER, **ROUTED, "head_dim": 4, "n_group": 2, "topk_group": 1, "norm_topk_prob": False},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {**ALL_HEADS, **ROUTED, **LATENT, "q_lora_rank": None},
        {**OTHER, **ROUTED, **LATENT, "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**ALL_HEADS, **ROUTED, **LATENT, **YARN, "n_group": 2, "topk_group": 1},
        {**OTHER, **ROUTED, **LATENT, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    ),
    "kimi_k2": (
        "DeepseekV3Config",
        {**ALL_HEADS, **ROUTED, **LATENT, **YARN, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5},
        {**OTHER, **ROUTED, **LATENT, "n_group": 1, "topk_group": 1},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {**LITE, **LATENT, "num_key_value_heads": 4, "mlp_layer_types": ["sparse", "dense"]},
        {**OTHER, **LATENT, **ROUTED_LITE, "n_group": 2, "topk_group": 1, "norm_topk_prob": False},
    ),
    "dots1": (
        "Dots1Config",
        {**SHAPE, **ROUTED, "attention_bias": True, "norm_topk_prob": True},
        {**OTHER, **ROUTED, "n_group": 2, "topk_group": 1},
    ),
    "solar_open": (
        "SolarOpenConfig",
        {**SOLAR, **SHAPE, **YARN, "head_dim": 8, "attention_bias": True},
        {**SOLAR, **OTHER, "head_dim": 4, "n_group": 2, "topk_group": 1, "norm_topk_prob": False},
    ),
    "hy_v3": (
        "HYV3Config",
        {**HY, **SHAPE, "num_experts": 8, "num_shared_experts": 2, "head_dim": 12, "attention_bias": True},
        {**HY, **OTHER, "num_experts": 6, "head_dim": 4, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {**SHAPE, **ERNIE, "tie_word_embeddings": False},
        {**OTHER, **ERNIE, "moe_num_experts": 6, "moe_num_shared_experts": 0, "moe_layer_interval": 2},
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {**SHAPE, **FOUR_LOCAL, "num_experts_per_tok": 2, "head_dim": 12},
        {
            **OTHER,
            **SIX_LOCAL,
            "num_experts_per_tok": 3,
            "head_dim": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        {**SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16},
        {**OTHER, "num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 8, "norm_topk_prob": True},
    ),
}


def both_of(kinds: Iterable[str]) -> list[Any]:
    """Return (kind, number) of both configurations as parameters; the second is a full test."""
    return [
        pytest.param(kind, number, id=f"{kind}-{number}", marks=[pytest.mark.full] if number else [])
        for kind in kinds
        for number in (0, 1)
    ]


def make(kind: str, folder: Path, number: int = 0, **changes: Any) -> Any:
    """Save a random model of a class as transformers does; return it. number: which configuration."""
    import transformers  # here: its import takes two seconds

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    name, *configs = CONFIGS[kind]
    kwargs = configs[number] | changes
    shard = kwargs.pop("max_shard_size", "5GB")
    config = getattr(transformers, name)(**kwargs)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model)
    model.save_pretrained(folder, max_shard_size=shard)
    if kind != config.model_type:
        change_config(folder, model_type=kind)  # another name for a class
    return model


@torch.no_grad()
def randomise(model: Any) -> None:
    """Give every weight a value that a mistake would show: norms and biases too."""
    generator = torch.Generator().manual_seed(5)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        if "inv_freq" in name or not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("norm.weight"):
            tensor.copy_(1 + 0.3 * noise)
        else:
            tensor.copy_(noise * (0.2 if tensor.dim() > 1 else 0.3))


def change_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json."""
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes, indent=2) + "\n")


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Replace the tensors."""
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def tokens(count: int = 3, length: int = LENGTH) -> Tensor:
    """Random words, int64 [count, length]."""
    return torch.randint(WORDS, (count, length), generator=torch.Generator().manual_seed(3))


def with_tokenizer(folder: Path) -> None:
    """A tokenizer of 48 words at most, as transformers saves one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted(set(re.findall(r"\w+|[^\w\s]", TEXT)))
    backend = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(["<eos>", "<unk>", *words])}, "<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    tokenizer.save_pretrained(folder)
