"""The keys of config.json of released models, by class: names, and values that are constants of the class.

Left out are `architectures`, `model_type` and the ids of tokens, which every export has, and keys of no use
to a program that loads the weights: `auto_map`, `quantization_config`, `transformers_version`, `torch_dtype`
(now `dtype`), `moe_capacity`, and weights of losses under other names (`aux_loss_alpha`).
"""

from typing import Any

ATTENTION = "num_attention_heads num_key_value_heads"
EVERY = (
    f"attention_dropout hidden_act hidden_size initializer_range intermediate_size max_position_embeddings "
    f"{ATTENTION} num_hidden_layers rms_norm_eps rope_theta tie_word_embeddings use_cache vocab_size"
)
LOSS = "router_aux_loss_coef"
LOCAL = f"num_local_experts num_experts_per_tok {LOSS}"
QWEN_MOE = f"decoder_sparse_step moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok {LOSS}"
QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": None}
ROUTED = (
    "first_k_dense_replace moe_intermediate_size n_group topk_group n_routed_experts n_shared_experts "
    "norm_topk_prob num_experts_per_tok routed_scaling_factor"
)
LATENT = "attention_bias kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim rope_scaling"
GRANITE = (
    "attention_bias attention_multiplier embedding_multiplier logits_scaling residual_multiplier "
    f"rope_scaling {LOCAL}"
)
NO_LOGITS = {"output_router_logits": False}
SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
# By model_type: the model whose file it is, names of keys, constants.
RELEASED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": (
        "Llama-3.1-8B",
        f"{EVERY} attention_bias rope_scaling",
        {"mlp_bias": False, "pretraining_tp": 1},
    ),
    "qwen3": ("Qwen3-8B", f"{EVERY} attention_bias head_dim rope_scaling max_window_layers", QWEN_WINDOWS),
    "qwen2": ("Qwen2.5-Math-7B", f"{EVERY} max_window_layers", {**QWEN_WINDOWS, "use_mrope": False}),
    "mistral": ("Mistral-7B-v0.3", f"{EVERY} sliding_window", {}),
    "mixtral": ("Mixtral-8x7B-v0.1", f"{EVERY} {LOCAL} sliding_window", NO_LOGITS),
    "minimax_m2": (
        "MiniMax-M2",
        f"{EVERY} {LOCAL} head_dim rotary_dim attn_type_list mlp_intermediate_size mtp_transformer_layers "
        "num_mtp_modules use_mtp",
        {
            **NO_LOGITS,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "layernorm_full_attention_beta": 1.0,
            "layernorm_linear_attention_beta": 1.0,
            "layernorm_mlp_beta": 1.0,
            "router_jitter_noise": 0.0,
            "shared_intermediate_size": 0,
            "shared_moe_mode": "sigmoid",
            "sliding_window": None,
        },
    ),
    "qwen2_moe": (
        "Qwen1.5-MoE-A2.7B",
        f"{EVERY} {QWEN_MOE} max_window_layers shared_expert_intermediate_size",
        {**QWEN_WINDOWS, **NO_LOGITS},
    ),
    "qwen3_moe": (
        "Qwen3-30B-A3B",
        f"{EVERY} {QWEN_MOE} attention_bias head_dim max_window_layers mlp_only_layers rope_scaling",
        {**QWEN_WINDOWS, **NO_LOGITS},
    ),
    "olmoe": (
        "OLMoE-1B-7B-0924",
        f"{EVERY} attention_bias norm_topk_prob num_experts num_experts_per_tok rope_scaling {LOSS}",
        {**NO_LOGITS, "clip_qkv": None},
    ),
    "glm4_moe": (
        "GLM-4.5",
        f"{EVERY} {ROUTED} attention_bias head_dim num_nextn_predict_layers partial_rotary_factor "
        "rope_scaling use_qk_norm",
        {},
    ),
    "dots1": (
        "dots.llm1.base",
        f"{EVERY} {ROUTED} attention_bias max_window_layers rope_scaling",
        {**QWEN_WINDOWS, "scoring_func": "noaux_tc", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    ),
    "ernie4_5_moe": (
        "ERNIE-4.5-21B-A3B-PT",
        f"{EVERY} head_dim moe_intermediate_size moe_k moe_layer_end_index moe_layer_interval "
        "moe_layer_start_index moe_num_experts moe_num_shared_experts rope_scaling",
        {"moe_gate": "topk", "moe_use_aux_free": True, "use_bias": False},
    ),
    "granitemoe": ("granite-3.1-1b-a400m", f"{EVERY} {GRANITE}", NO_LOGITS),
    "granitemoeshared": ("PowerMoE", f"{EVERY} {GRANITE} shared_intermediate_size", NO_LOGITS),
    "deepseek_v2": (
        "DeepSeek-V2-Lite",
        f"{EVERY} {ROUTED} {LATENT} topk_method",
        {
            "ep_size": 1,
            "moe_layer_freq": 1,
            "norm_topk_prob": False,
            "pretraining_tp": 1,
            "scoring_func": "softmax",
            "seq_aux": True,
        },
    ),
    "deepseek_v3": (
        "DeepSeek-V3",
        f"{EVERY} {ROUTED} {LATENT} num_nextn_predict_layers",
        {**SIGMOID, "ep_size": 1},
    ),
    "kimi_k2": (
        "Kimi-K2-Instruct",
        f"{EVERY} {ROUTED} {LATENT} num_nextn_predict_layers",
        {**SIGMOID, "ep_size": 1, "pretraining_tp": 1, "seq_aux": True},
    ),
    "glm4_moe_lite": (
        "GLM-4.7-Flash",
        f"{EVERY} {ROUTED} {LATENT} num_nextn_predict_layers",
        {"topk_method": "noaux_tc", "partial_rotary_factor": 1.0},
    ),
    "gpt_oss": (
        "gpt-oss-20b",
        f"{EVERY} {LOCAL} attention_bias experts_per_token head_dim initial_context_length layer_types "
        "rope_scaling sliding_window",
        {**NO_LOGITS, "swiglu_limit": 7.0},
    ),
    "solar_open": (
        "Solar-Open-100B",
        f"{EVERY} {ROUTED} attention_bias head_dim partial_rotary_factor rope_scaling",
        {"first_k_dense_replace": 0, "use_qk_norm": False},
    ),
    "hy_v3": (
        "Hy3-preview",
        f"{EVERY} expert_hidden_dim first_k_dense_replace head_dim moe_intermediate_size num_experts "
        "num_experts_per_tok num_nextn_predict_layers num_shared_experts router_scaling_factor",
        {
            **NO_LOGITS,
            "moe_router_enable_expert_bias": True,
            "moe_router_use_sigmoid": True,
            "qk_norm": True,
            "route_norm": True,
        },
    ),
}
