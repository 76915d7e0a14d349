"""Presets of further papers by name, see `megamoe.moe.presets`."""

from megamoe.moe.presets import TOP_1, add_preset

add_preset(
    "stable_moe",
    "Dai et al. 2022, StableMoE",
    scorer="stable",
    score_function="sigmoid",
    selector=TOP_1,
    losses={"stable_balance": 0.3, "stable_distillation": 1.0},
)
add_preset(
    "sinkhorn",
    "Clark et al. 2022, as Megatron-Core has it",
    score_function="sigmoid",
    selector={"name": "sinkhorn", "k": 1},
)
add_preset(
    "policy",
    "Dubois 2025, lecture slides on mixture of experts: routing as a policy; experimental",
    scorer="policy",
    selector="sample",
    losses={"grpo": 0.01},
)
add_preset(
    "remoe",
    "Wang et al. 2024, ReMoE: ReLU routing; losses.relu_sparsity.k is the mean number of experts of a token",
    score_function="relu",
    selector="above",
    losses={"relu_sparsity": {"weight": 1e-8, "k": 1.0}},
)
add_preset(
    "phi_moe",
    "Liu et al. 2024, GRIN (Phi-3.5-MoE): two experts; the loss's weight is the default of transformers' "
    "configuration class, while the released model has 0, and a jitter of the tokens that is absent here",
    selector={"name": "sparse_mixer", "k": 2, "epsilon": 0.01},
    losses={"switch_balance": {"weight": 0.001, "over_layers": "mean", "sum_of_f": "k"}},
)
add_preset(
    "moe_plus_plus",
    "Jin et al. 2024, MoE++: one zero, one copy and two constant experts beside 16 that compute, and gating "
    "residuals",
    residual="gating",
    zero_experts={"identity": 1, "zero": 1, "constant": 2},
    selector={"name": "top_k", "k": 2, "weights": "raw"},
    capacity={"name": "per_expert", "factor": 1.1, "tau": 0.75},
    losses={"heterogeneous_balance": 0.01},
)
add_preset(
    "deepseek_v4_moe",
    "DeepSeek-AI 2026, DeepSeek-V4: a table of token ids chooses in the first three MoE layers; groups: [] "
    "leaves the others' router in all layers",
    num_shared_experts=1,
    score_function={"name": "sqrt_softplus", "bias_update": 0.001},
    selector={"name": "top_k", "k": 6, "weights": "renormalised", "scale": 1.5},
    losses={"switch_balance": {"weight": 0.0001, "scope": "sequence"}},
    groups=[
        {
            "layers": "first 3",
            "router": {
                "scorer": "token_table",
                "score_function": {"bias_update": 0.0},
                "selector": {"name": "table", "k": 6, "weights": "renormalised", "scale": 1.5},
            },
            "losses": {},
        }
    ],
)
add_preset(
    "dense_to_sparse",
    "Nie et al. 2021, EvoMoE: Gumbel-softmax gates whose temperature falls, from almost all experts to few; "
    "the threshold is that of CustomDTSGate (github.com/VITA-Group/Random-MoE-as-Dropout)",
    scorer="dense_to_sparse",
    selector={"name": "above", "value": 0.001, "at_least": 1},
    losses={"switch_balance": 0.01},
)
add_preset(
    "top_any",
    "Guo et al. 2024, DynMoE: a learned threshold for each expert; the number of experts stays, and the loss "
    "of the authors' code on the router's weight (diverse_and_simple_gate_loss) is absent",
    scorer="cosine",
    score_function="sigmoid",
    selector="top_any",
)
add_preset(
    "skywork_moe",
    "Wei et al. 2024, Skywork-MoE: normalised logits, and a balance loss that follows the drop rate",
    scorer={"name": "linear", "bias": True},
    score_function="normalised_softmax",
    selector={"name": "top_k", "k": 2, "weights": "renormalised"},
    capacity={"name": "per_expert", "factor": 1.25, "priority": "probability"},
    losses={"drop_rate_balance": 0.01},
)
