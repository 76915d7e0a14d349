"""The papers' presets by name: each is a combination of parts, in the YAML `router: <name>`.

A preset sets what its paper specifies; the parts' defaults give the rest. The number and size of the experts
belong to the run. Every setting can be overridden.
"""

from typing import Any

from megamoe.registry import register_preset

Part = str | dict[str, Any]
TOP_1: Part = {"name": "top_k", "k": 1, "weights": "raw"}


def add_preset(
    name: str,
    source: str,
    *,
    scorer: Part = "linear",
    residual: Part | None = None,
    masks: list[Part] | None = None,
    score_function: Part = "softmax",
    selector: Part,
    capacity: Part = "none",
    losses: dict[str, Any] | None = None,
    **moe: Any,
) -> None:
    """Register a preset of these stages and losses; moe: further keys of the section `moe`."""
    stages = {"score_function": score_function, "selector": selector, "capacity": capacity}
    given = {"residual": residual, "masks": masks}
    router = {"scorer": scorer, **{key: part for key, part in given.items() if part}, **stages}
    register_preset(name, {**moe, "router": router, **({"losses": losses} if losses else {})}, source)


add_preset(
    "switch",
    "Fedus et al. 2021, Switch Transformer",
    scorer={"name": "linear", "jitter": 0.01},
    selector=TOP_1,
    capacity={"name": "per_expert", "factor": 1.25, "priority": "position"},
    losses={"switch_balance": {"weight": 0.01, "first_choice": True}},
)
add_preset(
    "gshard",
    "Lepikhin et al. 2021, GShard, algorithm 1; its capacity factor 2 counts tokens, not pairs",
    selector={"name": "top_k", "k": 2, "weights": "renormalised", "second": "random"},
    capacity={"name": "per_expert", "factor": 1.0, "priority": "choice_then_position"},
    losses={"switch_balance": {"weight": 0.01, "first_choice": True}},
)
add_preset(
    "sgmoe",
    "Shazeer et al. 2017, sparsely-gated mixture of experts",
    scorer="noisy",
    selector={"name": "top_k", "k": 4, "weights": "kept_softmax"},
    losses={"importance": 0.1, "load": 0.1},
)
add_preset(
    "x_moe_hypersphere",
    "Chi et al. 2022, X-MoE: on the representation collapse of sparse mixture of experts; the capacity, of "
    "which it says nothing, is that of MoEC's table 7",
    scorer="cosine",
    selector=TOP_1,
    capacity={"name": "per_expert", "factor": 2.0, "priority": "position"},
    losses={"cosine_balance": 0.01},
)
add_preset(
    "moec",
    "Xie et al. 2022, MoEC: mixture of expert clusters",
    scorer="cosine",
    masks=[{"name": "expert_dropout", "level": "cluster", "rate": 0.5, "cluster_size": 8}],
    selector=TOP_1,
    capacity={"name": "per_expert", "factor": 2.0, "priority": "position"},
    losses={
        "switch_balance": {"weight": 0.01, "first_choice": True},
        "clustering": {"weight": 0.01, "cluster_size": 8},
    },
)
add_preset(
    "xmoe_threshold",
    "Yang et al. 2024, XMoE: sparse models with fine-grained and adaptive expert selection",
    selector={"name": "threshold", "threshold": 0.9},
    # gamma is 1 for experts of the dense FFN's size, and n for experts of 1/n of it (eq. 6).
    capacity={"name": "per_expert", "factor": 2.0, "priority": "choice_then_probability"},
    losses={"switch_balance": {"weight": 0.01, "first_choice": True}},
)
add_preset(
    "deepseek_moe",
    "Dai et al. 2024, DeepSeekMoE (16B); larger ones add device_balance 0.05",
    num_shared_experts=2,
    score_function={"name": "softmax", "over": "all"},
    selector={"name": "top_k", "k": 6, "weights": "raw"},
    losses={"switch_balance": 0.001},
)
add_preset(
    "deepseek_v2",
    "DeepSeek-AI 2024, DeepSeek-V2, section 2.2.1 to 2.2.4",
    num_shared_experts=2,
    masks=[{"name": "group_limit", "num_groups": 8, "keep": 3, "score": "max"}],
    score_function={"name": "softmax", "over": "all"},
    selector={"name": "top_k", "k": 6, "weights": "raw"},
    capacity={"name": "device", "devices": 8, "factor": 1.0, "spare": 0.1},
    losses={
        "switch_balance": {"weight": 0.003, "scope": "sequence", "restricted": True},
        "device_balance": {"weight": 0.05, "num_groups": 8},
        "communication_balance": {"weight": 0.02, "num_groups": 8, "keep": 3},
    },
)
add_preset(
    "deepseek_v3",
    "DeepSeek-AI 2024, DeepSeek-V3, section 2.1.2; the factor 2.5 is of its released configuration",
    num_shared_experts=1,
    masks=[{"name": "group_limit", "num_groups": 8, "keep": 4, "score": "sum"}],
    score_function={"name": "sigmoid", "bias_update": 0.001},
    selector={"name": "top_k", "k": 8, "weights": "renormalised", "scale": 2.5},
    losses={"switch_balance": {"weight": 0.0001, "scope": "sequence"}},
)
