"""The MoE layers of Hugging Face's models as combinations of our parts: the same output, the same gradients.

Each layer gets the weights of the transformers module, which are random.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megamoe.moe.experts.shared import SharedExperts
from tests.support.moe.build import FFN, HIDDEN, VOCAB, make_context, make_hidden, make_layer, moe_config

EXPERTS, CHOSEN, SHARED, LATENT, TOKENS = 8, 3, 40, 8, 50
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": FFN,
    "num_experts_per_tok": CHOSEN,
    "num_attention_heads": 2,
}
GROUPS: dict[str, Any] = {**SIZES, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
SOFTMAX_OF_ALL = {"name": "softmax", "over": "all"}
# The bias of DeepSeek-V3 without its updates.
FIXED_BIAS = {"name": "sigmoid", "bias_update": 0.001, "bias_until": 0}
# The limit of its clamped SwiGLU is far away: the activation is the plain one.
V4: dict[str, Any] = {
    **SIZES,
    "num_local_experts": EXPERTS,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 1e9,
    "num_hidden_layers": 2,
    "mlp_layer_types": ["hash_moe", "moe"],
    "vocab_size": VOCAB,
}


# By our name: the function of the transformers module's named tensors, or their gradients, that equals ours.
WeightMap = dict[str, Callable[[Callable[[str], Any]], Tensor]]


def top_k(weights: str, **options: Any) -> dict[str, Any]:
    return {"name": "top_k", "k": CHOSEN, "weights": weights, **options}


def by_groups(score: str, **options: Any) -> list[dict[str, Any]]:
    return [{"name": "group_limit", "num_groups": 4, "keep": 2, "score": score, **options}]


# Model type: (names of the router and of the shared experts in the MoE module, configuration, our layer).
MODELS: dict[str, tuple[str, str | None, dict[str, Any], dict[str, Any]]] = {
    "Mixtral": (
        "MixtralSparseMoeBlock",
        None,
        {**SIZES, "intermediate_size": FFN, "num_local_experts": EXPERTS},
        {"router": {"selector": top_k("kept_softmax")}},
    ),
    "Olmoe": (
        "OlmoeSparseMoeBlock",
        None,
        {**SIZES, "intermediate_size": FFN, "num_experts": EXPERTS, "norm_topk_prob": False},
        {"router": {"selector": top_k("raw")}},
    ),
    "Qwen2Moe": (
        "Qwen2MoeSparseMoeBlock",
        "shared_expert",
        {**SIZES, "num_experts": EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": SHARED},
        {
            "num_shared_experts": 1,
            "shared_expert_mode": "gated",
            "shared_expert_ffn_hidden_size": SHARED,
            "router": {"selector": top_k("raw")},
        },
    ),
    "Qwen3Moe": (
        "Qwen3MoeSparseMoeBlock",
        None,
        {**SIZES, "num_experts": EXPERTS, "norm_topk_prob": True},
        {"router": {"selector": top_k("renormalised")}},
    ),
    "GraniteMoeShared": (
        "GraniteMoeSharedMoE",
        None,  # beside the MoE module, see `test_granites_shared_experts`
        {**SIZES, "intermediate_size": FFN, "num_local_experts": EXPERTS},
        {"router": {"selector": top_k("kept_softmax")}},
    ),
    "DeepseekV2": (
        "DeepseekV2Moe",
        "shared_experts",
        {**GROUPS, "n_routed_experts": EXPERTS, "n_shared_experts": 2, "topk_method": "group_limited_greedy"},
        {
            "num_shared_experts": 2,
            "router": {
                "masks": by_groups("max"),
                "score_function": SOFTMAX_OF_ALL,
                "selector": top_k("raw", scale=2.5),
            },
        },
    ),
    "DeepseekV3": (
        "DeepseekV3MoE",
        "shared_experts",
        {**GROUPS, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "norm_topk_prob": True},
        {
            "num_shared_experts": 1,
            "router": {
                "masks": by_groups("sum", best=2),
                "score_function": FIXED_BIAS,
                "selector": top_k("renormalised", scale=2.5),
            },
        },
    ),
    "GptOss": (
        "GptOssMLP",
        None,
        {**SIZES, "intermediate_size": FFN, "num_local_experts": EXPERTS},
        {
            "expert_bias": True,
            "expert_activation": "swiglu_clamped",
            "router": {"scorer": {"name": "linear", "bias": True}, "selector": top_k("kept_softmax")},
        },
    ),
    "Glm4Moe": (
        "Glm4MoeMoE",
        "shared_experts",
        {**SIZES, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
        {
            "num_shared_experts": 1,
            "router": {"score_function": FIXED_BIAS, "selector": top_k("renormalised")},
        },
    ),
    "DeepseekV4": (
        "DeepseekV4SparseMoeBlock",
        "shared_experts",
        V4,
        {
            "num_shared_experts": 1,
            "router": {
                "score_function": {**FIXED_BIAS, "name": "sqrt_softplus"},
                "selector": top_k("renormalised", scale=1.5),
            },
        },
    ),
    "MiniMaxM2": (
        "MiniMaxM2SparseMoeBlock",
        None,
        {**SIZES, "intermediate_size": FFN, "num_local_experts": EXPERTS},
        {"router": {"score_function": FIXED_BIAS, "selector": top_k("renormalised")}},
    ),
}


def built(model: str, module: str, *position: int, **options: Any) -> Any:
    """Return a module of transformers; its weights, and its router's buffers of numbers, are random."""
    transformers = pytest.importorskip("transformers")  # here: its import takes two seconds
    kind = getattr(transformers, f"{model}Config")
    config = kind(**options)
    config._experts_implementation = "eager"
    modeling = importlib.import_module(kind.__module__.replace("configuration", "modeling"))
    made = getattr(modeling, module)(config, *position)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(0, 0.4, generator=generator)
    return made


def with_bias(layer: Any, bias_E: Tensor) -> Any:
    """Return the layer with this bias of its score function."""
    layer.router.score_function.bias_E.copy_(bias_E)
    return layer


def weight_map(name: str) -> WeightMap:
    if name == "GptOss":
        return GPT_OSS
    gate = "router" if name.startswith("Granite") else "gate"
    found: WeightMap = {
        "router.scorer.weight": lambda of: of(f"{gate}.weight"),
        "experts.up": lambda of: of("experts.gate_up_proj"),
        "experts.down": lambda of: of("experts.down_proj"),
    }
    shared = MODELS[name][1]
    if shared is not None:
        halves = [f"{shared}.{half}_proj.weight" for half in ("gate", "up")]
        found["shared.up"] = lambda of: torch.cat([of(half) for half in halves])
        found["shared.down"] = lambda of: of(f"{shared}.down_proj.weight")
    if name == "Qwen2Moe":
        found["shared.gate"] = lambda of: of("shared_expert_gate.weight")[0]
    return found


def unmixed(tensor: Tensor) -> Tensor:
    """GptOss's first weights have the columns of gate and value in turns."""
    return torch.cat([tensor[..., ::2], tensor[..., 1::2]], dim=-1)


GPT_OSS: WeightMap = {  # its matrices are transposed
    "router.scorer.weight": lambda of: of("router.weight"),
    "router.scorer.bias": lambda of: of("router.bias"),
    "experts.up": lambda of: unmixed(of("experts.gate_up_proj")).transpose(1, 2),
    "experts.up_bias": lambda of: unmixed(of("experts.gate_up_proj_bias")),
    "experts.down": lambda of: of("experts.down_proj").transpose(1, 2),
    "experts.down_bias": lambda of: of("experts.down_proj_bias"),
}


@pytest.mark.parametrize("name", MODELS)
def test_output_and_gradients_are_those_of_transformers(name: str) -> None:
    module_name, _, options, tree = MODELS[name]
    module = built(name, module_name, *((1,) if name == "DeepseekV4" else ()), **options)
    config = moe_config(num_experts=EXPERTS, **tree)
    layer = make_layer(config, activation=config.expert_activation or "swiglu")
    if layer.router.score_function.bias_E is not None:
        beside = "" if name == "MiniMaxM2" else "gate."
        with_bias(layer, module.get_buffer(f"{beside}e_score_correction_bias"))
    compare(module, layer, weight_map(name))


def test_the_groups_and_the_bias_decide() -> None:
    """The comparison would not see a mask or a bias that excludes nothing."""
    for name in ("DeepseekV2", "DeepseekV3", "Glm4Moe"):
        layer = make_layer(moe_config(num_experts=EXPERTS, **MODELS[name][3]))
        if layer.router.score_function.bias_E is not None:
            with_bias(layer, torch.linspace(-0.4, 0.4, EXPERTS))
        routing = layer.router(make_hidden(TOKENS), layer.context)
        best_TK = routing.affinities_TE.topk(CHOSEN).indices.sort(1).values
        chosen_TK = routing.pairs.expert_N.view(TOKENS, CHOSEN).sort(1).values
        assert 0.05 < (best_TK != chosen_TK).any(1).float().mean() < 1


def test_granites_shared_experts() -> None:
    """They stand beside the MoE module, and their first weight is one matrix of gate and value."""
    sizes = {"hidden_size": HIDDEN, "shared_intermediate_size": SHARED}
    module = built("GraniteMoeShared", "GraniteMoeSharedMLP", **sizes)
    tree = {"num_shared_experts": 1, "shared_expert_ffn_hidden_size": SHARED}
    shared = make_layer(moe_config(num_experts=EXPERTS, **tree)).shared
    assert isinstance(shared, SharedExperts)
    with torch.no_grad():
        shared.up.copy_(module.input_linear.weight)
        shared.down.copy_(module.output_linear.weight)
    torch.testing.assert_close(shared(make_hidden(9)), module(make_hidden(9)), rtol=1e-6, atol=1e-6)


def compare(module: nn.Module, layer: Any, makes: WeightMap, *more: Tensor) -> None:
    """See that output and gradients are the same with the module's weights; more: its further arguments."""
    named, ours = dict(module.named_parameters()), dict(layer.named_parameters())
    assert makes.keys() == ours.keys()
    with torch.no_grad():
        for key, make in makes.items():
            ours[key].copy_(make(named.__getitem__))
    given_TH, expected_TH = (make_hidden(TOKENS).requires_grad_() for _ in range(2))
    output_TH, whole_1TH = layer(given_TH), module(expected_TH[None], *more)
    whole_1TH = whole_1TH[0] if isinstance(whole_1TH, tuple) else whole_1TH
    largest = float(whole_1TH.detach().abs().max())
    torch.testing.assert_close(output_TH, whole_1TH[0], rtol=1e-6, atol=1e-6 * largest)
    sent_TH = make_hidden(TOKENS, seed=5)
    (output_TH * sent_TH).sum().backward()
    (whole_1TH[0] * sent_TH).sum().backward()
    gradients: dict[str, Any] = {
        key: (ours[key].grad, make(lambda k: named[k].grad)) for key, make in makes.items()
    }
    for key, (found, expected) in {**gradients, "hidden": (given_TH.grad, expected_TH.grad)}.items():
        atol = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=atol, msg=f"gradient of {key}")


def test_deepseek_v4s_table_chooses_and_its_scorer_weights() -> None:
    module = built("DeepseekV4", "DeepseekV4SparseMoeBlock", 0, **V4)
    table_VK = torch.rand(VOCAB, EXPERTS, generator=torch.Generator().manual_seed(3)).argsort(1)[:, :CHOSEN]
    module.gate.tid2eid.copy_(table_VK)
    ids_T = torch.arange(TOKENS) * 7 % VOCAB
    router = {
        "scorer": "token_table",
        "score_function": "sqrt_softplus",
        "selector": {"name": "table", "k": CHOSEN, "weights": "renormalised", "scale": 1.5},
    }
    tree = {"num_experts": EXPERTS, "num_shared_experts": 1, "router": router}
    layer = make_layer(moe_config(**tree), make_context(token_ids_T=ids_T))
    layer.router.get_buffer("scorer.table_KV").copy_(table_VK.T)
    compare(module, layer, weight_map("DeepseekV4"), ids_T[None])


def test_phis_sparse_mixer_in_evaluation() -> None:
    """In training the draws differ; `selectors/test_sparse_mixer.py` compares those with their formulas."""
    options = {"intermediate_size": FFN, "num_local_experts": EXPERTS, "router_jitter_noise": 0.2}
    sizes = {**SIZES, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    module = built("Phimoe", "PhimoeSparseMoeBlock", **sizes, **options).eval()
    router = {"selector": {"name": "sparse_mixer", "k": 2, "epsilon": 0.2}}
    layer = make_layer(moe_config(num_experts=EXPERTS, router=router)).eval()
    makes = {key: make for key, make in weight_map("Mixtral").items() if key != "router.scorer.weight"}
    compare(module, layer, {**makes, "router.scorer.weight": lambda of: of("router.weight")})


def test_nemotrons_latent_experts() -> None:
    """Its experts have no gate; theirs square the ReLU by default, which is an option of the module."""
    module = built(
        "NemotronH",
        "NemotronHMoE",
        **GROUPS,
        n_routed_experts=EXPERTS,
        moe_latent_size=LATENT,
        moe_shared_expert_intermediate_size=SHARED,
        mlp_hidden_act="relu",
    )
    tree = {
        "num_experts": EXPERTS,
        "latent_size": LATENT,
        "num_shared_experts": 1,
        "shared_expert_ffn_hidden_size": SHARED,
        "router": {
            "masks": by_groups("sum", best=2),
            "score_function": FIXED_BIAS,
            "selector": top_k("renormalised", scale=2.5),
        },
    }
    layer = with_bias(make_layer(moe_config(**tree), activation="relu"), module.gate.e_score_correction_bias)
    names = {
        "router.scorer.weight": "gate.weight",
        "experts.up": "experts.up_proj",
        "experts.down": "experts.down_proj",
        "shared.up": "shared_experts.up_proj.weight",
        "shared.down": "shared_experts.down_proj.weight",
        "to_latent.weight": "fc1_latent_proj.weight",
        "to_hidden.weight": "fc2_latent_proj.weight",
    }
    compare(module, layer, {ours: partial(lambda name, of: of(name), name) for ours, name in names.items()})


def test_longcats_identity_experts() -> None:
    """Their first weight has rows of the identity experts too, which nothing reads: no gradient is there."""
    module = built(
        "LongcatFlash",
        "LongcatFlashMoE",
        hidden_size=HIDDEN,
        expert_ffn_hidden_size=FFN,
        moe_topk=CHOSEN,
        n_routed_experts=EXPERTS,
        zero_expert_num=4,
        routed_scaling_factor=2.0,
        num_attention_heads=2,
    )
    held = {"bias_update": 0.001, "mean_experts": 2.0}
    router = {"score_function": {**SOFTMAX_OF_ALL, **held}, "selector": top_k("raw", scale=2.0)}
    layer = make_layer(moe_config(num_experts=EXPERTS, zero_experts={"identity": 4}, router=router))
    with_bias(layer, module.router.e_score_correction_bias)
    makes: WeightMap = {
        "router.scorer.weight": lambda of: of("router.classifier.weight"),
        "experts.up": lambda of: of("experts.gate_up_proj")[:EXPERTS],
        "experts.down": lambda of: of("experts.down_proj"),
    }
    compare(module, layer, makes)
    assert module.experts.gate_up_proj.shape[0] == EXPERTS + 4  # the defect
    assert not module.experts.gate_up_proj.grad[EXPERTS:].any()
    expert_TK = module.router(make_hidden(TOKENS))[2].sort(1).values
    routing = layer.router(make_hidden(TOKENS), layer.context)
    assert torch.equal(routing.pairs.expert_N.view(TOKENS, CHOSEN).sort(1).values, expert_TK)
    assert 0.1 < (expert_TK >= EXPERTS).float().mean() < 0.9
