"""Presets of further papers by name, see `megamoe.moe.presets`."""

from megamoe.moe.presets import TOP_1, add_preset

add_preset(
    "sgmoe_hierarchical",
    "Shazeer et al. 2017, appendix B",
    scorer={"name": "hierarchical", "noisy": True},
    selector={"name": "hierarchical_top_k", "groups": 2, "k": 2},
    losses={"importance": 0.1, "hierarchical_load": 0.1},
)
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
add_preset("hash", "Roller et al. 2021, Hash Layers", scorer="hash", selector="table")
add_preset("base", "Lewis et al. 2021, BASE layers", score_function="sigmoid", selector="balanced")
add_preset(
    "expert_choice",
    "Zhou et al. 2022, expert choice routing; a decoder needs selector.allow_non_causal",
    selector={"name": "expert_choice", "k": 2},
)
add_preset(
    "kimi_k2",
    "Moonshot AI 2025, Kimi K2: DeepSeek-V3's router without groups; 384 experts; of its configuration",
    num_shared_experts=1,
    score_function={"name": "sigmoid", "bias_update": 0.001},
    selector={"name": "top_k", "k": 8, "weights": "renormalised", "scale": 2.827},
)
add_preset(
    "minimax_m2",
    "MiniMax 2025, MiniMax-M2: 8 of 256 experts, none shared; the loss's weight is of its configuration",
    score_function={"name": "sigmoid", "bias_update": 0.001},
    selector={"name": "top_k", "k": 8, "weights": "renormalised"},
    losses={"switch_balance": {"weight": 0.001, "over_layers": "mean", "sum_of_f": "k"}},
)
add_preset(
    "nemotron_latent",
    "NVIDIA 2025, Nemotron 3, LatentMoE: sigmoid scores with a learning bias; moe.latent_size is the run's, "
    "a quarter of the hidden size in the paper's largest models",
    num_shared_experts=1,
    score_function={"name": "sigmoid", "bias_update": 0.001},
    selector={"name": "top_k", "k": 22, "weights": "renormalised", "scale": 5.0},
    losses={"switch_balance": {"weight": 0.0001, "scope": "sequence"}},
)
add_preset(
    "longcat_flash",
    "Meituan 2025, LongCat-Flash: 12 of 512 experts and 256 identity experts, of which 8 compute on average; "
    "moe.zero_experts.identity is the run's",
    score_function={"name": "softmax", "over": "all", "bias_update": 0.001, "mean_experts": 8.0},
    selector={"name": "top_k", "k": 12, "weights": "raw", "scale": 6.0},
)
