"""Variants of attention against the modules of transformers with the same weights: outputs and gradients."""

import importlib
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megamoe.config import RunConfig
from megamoe.config.shapes import head_size
from megamoe.kernels.library import find_library
from megamoe.model.architectures.decoder import GPT
from tests.support.moe.build import gradient_of
from tests.support.tiny import tiny, tiny_gpt

pytestmark = pytest.mark.usefixtures("one_rank")

B, S, WINDOW = 2, 75, 20
HIDDEN, HEADS, GROUPS = 48, 4, 2
SHAPE = (
    f"model.hidden_size={HIDDEN}",
    f"model.num_attention_heads={HEADS}",
    f"model.num_query_groups={GROUPS}",
    f"data.sequence_length={S}",
    "model.rope_base=500",
    "model.num_layers=2",
    "moe.layers=none",
    "moe.losses={}",
)


@dataclass
class Case:
    """A model of transformers, and the keys with which ours is the same. block: counted from 1."""

    name: str
    overrides: list[str]
    options: dict[str, Any] = field(default_factory=dict)
    block: int = 1


CASES = {
    "Qwen2": Case("qwen2.Qwen2", ["model.attention.input_bias=true"]),
    "Qwen3": Case(
        "qwen3.Qwen3", ["model.attention.query_key_norm=head", "model.head_size=20"], {"head_dim": 20}
    ),
    "OLMoE": Case("olmoe.Olmoe", ["model.attention.query_key_norm=whole"]),
    "Glm4Moe": Case(
        "glm4_moe.Glm4Moe",
        ["model.bias=true", "model.attention.output_bias=false", "model.attention.query_key_norm=head"],
        {"use_qk_norm": True, "head_dim": 12, "partial_rotary_factor": 1.0, "attention_bias": True},
    ),
    "gpt-oss": Case(
        "gpt_oss.GptOss",
        [
            "model.bias=true",
            f"model.attention={{sinks: true, window: {WINDOW}, window_blocks: [1]}}",
            "model.head_size=16",
        ],
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_bias": True,
        },
    ),
    "Gemma2": Case(
        "gemma2.Gemma2",
        [f"model.attention={{soft_cap: 2.5, scale: 0.2, window: {WINDOW}, window_blocks: [1]}}"],
        {
            "attn_logit_softcapping": 2.5,
            "query_pre_attn_scalar": 25,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "head_dim": 12,
        },
    ),
}
CASES["gpt-oss, whole"] = replace(CASES["gpt-oss"], block=2)
CASES["Gemma2, whole"] = replace(CASES["Gemma2"], block=2)
# With a key head for each query head the projection is split on a way of its own (`SplittingSelfAttention`).
for _name in ("Qwen3", "OLMoE"):
    _overrides = [*CASES[_name].overrides, f"model.num_query_groups={HEADS}"]
    CASES[f"{_name}, without groups"] = replace(CASES[_name], overrides=_overrides)


def of_transformers(name: str, block: int, **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """Return the attention, the rotary positions and the configuration of transformers' model."""
    transformers = pytest.importorskip("transformers")
    folder, prefix = name.split(".")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    settings = getattr(transformers, f"{prefix}Config")(max_position_embeddings=S, **options)
    settings._attn_implementation = "eager"
    attention = getattr(module, f"{prefix}Attention")(settings, block)
    return attention, getattr(module, f"{prefix}RotaryEmbedding")(settings), settings


def theirs_of(case: Case, config: RunConfig) -> tuple[nn.Module, nn.Module, Any]:
    model = config.model
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": float(model.rope_base)}
    if "partial_rotary_factor" in case.options:
        rotary["partial_rotary_factor"] = case.options["partial_rotary_factor"]
    return of_transformers(
        case.name,
        case.block - 1,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups,
        rms_norm_eps=model.norm_eps,
        rope_parameters=rotary,
        **case.options,
    )


def names_of(attention: nn.Module, theirs: nn.Module) -> dict[str, str]:
    """Return the place of each of their parameters in ours; "qkv" is the common projection."""
    places = {"o_proj": "linear_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
    found = {}
    for name, _ in theirs.named_parameters():
        module, _, kind = name.rpartition(".")
        if module in ("q_proj", "k_proj", "v_proj"):
            found[name] = f"linear_qkv.{kind}"
        elif name == "sinks":
            found[name] = "core_attention.softmax_offset"
        else:
            found[name] = f"{places[module]}.{kind}"
    assert set(found.values()) == {name for name, _ in attention.named_parameters()}
    return found


def part_of(name: str, ours: Tensor, size: int, groups: int) -> Tensor:
    """Return their tensor of ours, which has the rows of each group's queries, key and value together."""
    side = "qkv".find(name[0]) if name[1:].startswith("_proj") else -1
    if side < 0:
        return ours
    sizes = [HEADS // groups * size, size, size]
    return ours.view(groups, sum(sizes), *ours.shape[1:]).split(sizes, dim=1)[side].flatten(0, 1)


def started(case: Case, kernels: str) -> tuple[GPT, nn.Module, RunConfig]:
    """Return our model, and its attention in the case's block with random biases, norms and sinks."""
    config = tiny(*SHAPE, f"model.cpu_kernels={kernels}", *case.overrides)
    model = tiny_gpt(config)
    attention = model.model.decoder.layers[case.block - 1].self_attention
    random = torch.Generator().manual_seed(3)
    for parameter in attention.parameters():
        with torch.no_grad():
            parameter.copy_(
                torch.randn(parameter.shape, generator=random) * (0.2 if parameter.dim() > 1 else 1)
            )
    return model, attention, config


@pytest.mark.parametrize("kernels", ["compiled", "plain"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name: str, kernels: str) -> None:
    if kernels == "compiled" and find_library()[0] is None:
        pytest.skip(find_library()[1])
    case = CASES[name]
    _, attention, config = started(case, kernels)
    theirs, rotary, settings = theirs_of(case, config)
    places, groups = names_of(attention, theirs), config.model.num_query_groups
    assert groups is not None
    sizes = (head_size(config.model), groups)
    ours = dict(attention.named_parameters())
    with torch.no_grad():
        for other, parameter in theirs.named_parameters():
            parameter.copy_(part_of(other, ours[places[other]], *sizes))
    assert_same(attention, theirs, rotary, mask_of(theirs, settings))
    for other, parameter in theirs.named_parameters():
        mine = part_of(other, gradient_of(ours[places[other]]), *sizes)
        same_gradient(mine, gradient_of(parameter), other)


def assert_same(attention: nn.Module, theirs: nn.Module, rotary: nn.Module, mask_B1SS: Tensor) -> None:
    """Run both forward and backward: the same outputs, and gradients of the input."""
    hidden_SBH = torch.randn(S, B, HIDDEN, requires_grad=True)
    output, bias = attention(hidden_SBH, None)
    found_SBH = output if bias is None else output + bias
    their_BSH = hidden_SBH.detach().transpose(0, 1).requires_grad_()
    angles = rotary(their_BSH, torch.arange(S)[None])
    expected_BSH, _ = theirs(their_BSH, position_embeddings=angles, attention_mask=mask_B1SS)
    upstream_SBH = torch.randn_like(found_SBH)
    found_SBH.backward(upstream_SBH)
    expected_BSH.backward(upstream_SBH.transpose(0, 1))
    assert expected_BSH.std() > 0.1
    torch.testing.assert_close(found_SBH, expected_BSH.transpose(0, 1), rtol=1e-5, atol=1e-5)
    same_gradient(gradient_of(hidden_SBH), gradient_of(their_BSH).transpose(0, 1), "input")


def mask_of(theirs: nn.Module, settings: Any) -> Tensor:
    """Return transformers' own mask for the module's block, additive [B, 1, S, S]."""
    from transformers import masking_utils

    sliding = getattr(theirs, "sliding_window", None) is not None
    make = masking_utils.create_sliding_window_causal_mask if sliding else masking_utils.create_causal_mask
    mask: Tensor = make(
        config=settings,
        inputs_embeds=torch.zeros(B, S, HIDDEN),
        attention_mask=None,
        past_key_values=None,
        position_ids=torch.arange(S)[None],
    )
    assert mask.shape[-2:] == (S, S)
    return mask


def same_gradient(found: Tensor, expected: Tensor, name: str) -> None:
    largest = float(expected.abs().max())
    assert largest > 0, name
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, largest), name
