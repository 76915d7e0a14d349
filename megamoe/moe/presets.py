"""The papers' presets by name: each is a combination of parts, in the YAML `router: <name>`.

A preset sets what its paper specifies; the parts' defaults give the rest. The number and size of the experts
belong to the run. Every setting can be overridden.
"""

from megamoe.registry import register_preset

register_preset(
    "switch",
    {
        "router": {
            "scorer": {"name": "linear", "jitter": 0.01},
            "score_function": "softmax",
            "selector": {"name": "top_k", "k": 1, "weights": "raw"},
            "capacity": {"name": "per_expert", "factor": 1.25, "priority": "position"},
        },
        "losses": {"switch_balance": {"weight": 0.01, "first_choice": True}},
    },
    source="Fedus et al. 2021, Switch Transformer",
)

register_preset(
    "gshard",
    {
        "router": {
            "scorer": "linear",
            "score_function": "softmax",
            "selector": {"name": "top_k", "k": 2, "weights": "renormalised", "second": "random"},
            "capacity": {"name": "per_expert", "factor": 1.0, "priority": "choice_then_position"},
        },
        "losses": {"switch_balance": {"weight": 0.01, "first_choice": True}},
    },
    source="Lepikhin et al. 2021, GShard, algorithm 1; its capacity factor 2 counts tokens, not pairs",
)

register_preset(
    "sgmoe",
    {
        "router": {
            "scorer": "noisy",
            "score_function": "softmax",
            "selector": {"name": "top_k", "k": 4, "weights": "kept_softmax"},
            "capacity": "none",
        },
        "losses": {"importance": 0.1, "load": 0.1},
    },
    source="Shazeer et al. 2017, sparsely-gated mixture of experts",
)

register_preset(
    "sgmoe_hierarchical",
    {
        "router": {
            "scorer": {"name": "hierarchical", "noisy": True},
            "score_function": "softmax",
            "selector": {"name": "hierarchical_top_k", "groups": 2, "k": 2},
            "capacity": "none",
        },
        "losses": {"importance": 0.1, "hierarchical_load": 0.1},
    },
    source="Shazeer et al. 2017, appendix B",
)

register_preset(
    "x_moe_hypersphere",
    {
        "router": {
            "scorer": "cosine",
            "score_function": "softmax",
            "selector": {"name": "top_k", "k": 1, "weights": "raw"},
            "capacity": {"name": "per_expert", "factor": 2.0, "priority": "position"},
        },
        "losses": {"cosine_balance": 0.01},
    },
    source="Chi et al. 2022, X-MoE: on the representation collapse of sparse mixture of experts",
)

register_preset(
    "moec",
    {
        "router": {
            "scorer": "cosine",
            "masks": [{"name": "expert_dropout", "level": "cluster", "rate": 0.5, "cluster_size": 8}],
            "score_function": "softmax",
            "selector": {"name": "top_k", "k": 1, "weights": "raw"},
            "capacity": {"name": "per_expert", "factor": 2.0, "priority": "position"},
        },
        "losses": {
            "switch_balance": {"weight": 0.01, "first_choice": True},
            "clustering": {"weight": 0.01, "cluster_size": 8},
        },
    },
    source="Xie et al. 2022, MoEC: mixture of expert clusters",
)

register_preset(
    "xmoe_threshold",
    {
        "router": {
            "scorer": "linear",
            "score_function": "softmax",
            "selector": {"name": "threshold", "threshold": 0.9},
            # gamma is 1 for experts of the dense FFN's size, and n for experts of 1/n of it (eq. 6).
            "capacity": {"name": "per_expert", "factor": 2.0, "priority": "choice_then_probability"},
        },
        "losses": {"switch_balance": {"weight": 0.01, "first_choice": True}},
    },
    source="Yang et al. 2024, XMoE: sparse models with fine-grained and adaptive expert selection",
)

register_preset(
    "hash",
    {"router": {"scorer": "hash", "score_function": "softmax", "selector": "table", "capacity": "none"}},
    source="Roller et al. 2021, Hash Layers",
)

register_preset(
    "base",
    {"router": {"scorer": "linear", "score_function": "sigmoid", "selector": "balanced", "capacity": "none"}},
    source="Lewis et al. 2021, BASE layers",
)

register_preset(
    "expert_choice",
    {
        "router": {
            "scorer": "linear",
            "score_function": "softmax",
            "selector": {"name": "expert_choice", "k": 2},
            "capacity": "none",
        }
    },
    source="Zhou et al. 2022, expert choice routing; a decoder needs selector.allow_non_causal",
)

register_preset(
    "deepseek_moe",
    {
        "num_shared_experts": 2,
        "router": {
            "scorer": "linear",
            "score_function": {"name": "softmax", "over": "all"},
            "selector": {"name": "top_k", "k": 6, "weights": "raw"},
            "capacity": "none",
        },
        "losses": {"switch_balance": 0.001},
    },
    source="Dai et al. 2024, DeepSeekMoE (16B); larger ones add device_balance 0.05",
)

register_preset(
    "deepseek_v2",
    {
        "num_shared_experts": 2,
        "router": {
            "scorer": "linear",
            "masks": [{"name": "group_limit", "num_groups": 8, "keep": 3, "score": "max"}],
            "score_function": {"name": "softmax", "over": "all"},
            "selector": {"name": "top_k", "k": 6, "weights": "raw"},
            "capacity": {"name": "device", "devices": 8, "factor": 1.0, "spare": 0.1},
        },
        "losses": {
            "switch_balance": {"weight": 0.003, "scope": "sequence", "restricted": True},
            "device_balance": {"weight": 0.05, "num_groups": 8},
            "communication_balance": {"weight": 0.02, "num_groups": 8, "keep": 3},
        },
    },
    source="DeepSeek-AI 2024, DeepSeek-V2, section 2.2.1 to 2.2.4",
)

register_preset(
    "deepseek_v3",
    {
        "num_shared_experts": 1,
        "router": {
            "scorer": "linear",
            "masks": [{"name": "group_limit", "num_groups": 8, "keep": 4, "score": "sum"}],
            "score_function": {"name": "sigmoid", "bias_update": 0.001},
            "selector": {"name": "top_k", "k": 8, "weights": "renormalised", "scale": 2.5},
            "capacity": "none",
        },
        "losses": {"switch_balance": {"weight": 0.0001, "scope": "sequence"}},
    },
    source="DeepSeek-AI 2024, DeepSeek-V3, section 2.1.2; the factor 2.5 is of its released configuration",
)

register_preset(
    "stable_moe",
    {
        "router": {
            "scorer": "stable",
            "score_function": "sigmoid",
            "selector": {"name": "top_k", "k": 1, "weights": "raw"},
            "capacity": "none",
        },
        "losses": {"stable_balance": 0.3, "stable_distillation": 1.0},
    },
    source="Dai et al. 2022, StableMoE",
)

register_preset(
    "sinkhorn",
    {
        "router": {
            "scorer": "linear",
            "score_function": "sigmoid",
            "selector": {"name": "sinkhorn", "k": 1},
            "capacity": "none",
        }
    },
    source="Clark et al. 2022, as Megatron-Core has it",
)

register_preset(
    "policy",
    {
        "router": {"scorer": "policy", "score_function": "softmax", "selector": "sample", "capacity": "none"},
        "losses": {"grpo": 0.01},
    },
    source="Dubois 2025, lecture slides on mixture of experts: routing as a policy; experimental",
)
