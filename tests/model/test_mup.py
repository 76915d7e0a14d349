"""muP against its table worked by hand: initial weights, factors of the model, rates, refusals."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from megamoe.config.mup import without_mup
from megamoe.optim.optimizers import parameter_groups
from megamoe.optim.parameter_groups import width_powers
from tests.support.tiny import VOCABULARY, tiny, tiny_model

BASE, WIDTH = 16, 4  # the base model's hidden size, and how many times wider this one is
TOKENS = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(5))
POSITIONS = torch.arange(8).expand(2, 8)
WIDE = (
    f"model.hidden_size={BASE * WIDTH}",
    "model.num_attention_heads=4",
    "model.ffn_hidden_size=96",
    "moe.expert_ffn_hidden_size=48",
    "moe.layers={at: [2]}",
    "moe.num_shared_experts=1",
    "moe.shared_expert_mode=residual",
    "moe.latent_size=32",
    "moe.zero_experts={identity: 1, constant: 2}",
)
MUP = f"model.mup={{base: {BASE}}}"
# Of a wide model, by a part of the weight's name: factors on the initial std, on AdamW's rate, and on Muon's
# rate with the scales `moonlight` and `spectral`. None: AdamW updates it.
TABLE = {
    r"word_embeddings|output_layer|zero\.vector": (1, 1, None, None),
    r"norm|bias": (1, 1, None, None),
    r"router\.scorer\.weight|(shared|zero)\.mix$": (1 / WIDTH, 1 / WIDTH, None, None),
    r"(linear_(qkv|proj|fc1|fc2)|to_latent|to_hidden)\.weight|experts\.(up|down)|shared\.(up|down)": (
        *(1 / math.sqrt(WIDTH), 1 / WIDTH),
        *(1 / math.sqrt(WIDTH), 1),
    ),
}


def row(name: str) -> tuple[float, float, float | None, float | None]:
    (found,) = {value for pattern, value in TABLE.items() if re.search(pattern, name)}
    return found


@pytest.mark.parametrize("tied", ["true", "false"])
def test_initial_weights_are_those_of_the_table(one_rank: None, tied: str) -> None:
    overrides = (*WIDE, f"model.tie_embeddings={tied}")
    plain = dict(tiny_model(tiny(*overrides)).named_parameters())
    for name, weight in tiny_model(tiny(*overrides, MUP)).named_parameters():
        torch.testing.assert_close(weight, plain[name] * row(name)[0], msg=name)


def test_at_the_base_nothing_changes(one_rank: None) -> None:
    config = tiny(*WIDE, f"model.mup={{base: {BASE * WIDTH}, base_head_size: 16, base_layers: 2}}")
    model: Any = tiny_model(config)
    plain: Any = tiny_model(tiny(*WIDE))
    for (name, weight), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight, theirs), name
    assert torch.equal(model.whole_logits(TOKENS, POSITIONS), plain.whole_logits(TOKENS, POSITIONS))
    groups = [parameter_groups(model, config.optimizer, of) for of in (config.model, None)]
    assert [[(key, group[key]) for key in ("lr_scale", "weight_decay")] for group in groups[0]] == [
        [(key, group[key]) for key in ("lr_scale", "weight_decay")] for group in groups[1]
    ]


@pytest.mark.parametrize("own_scale", [None, 0.3])
def test_factors_of_the_model(one_rank: None, own_scale: float | None) -> None:
    """Heads four times as wide and twice as many blocks: the same as keys of their own, and as exported."""
    mup = f"model.mup={{base: {BASE}, base_head_size: 4, base_layers: 1}}"
    wide = (*WIDE, "model.init_std=0.3", *([f"model.attention.scale={own_scale}"] if own_scale else []))
    config = tiny(*wide, mup)
    model: Any = tiny_model(config)
    scale = (own_scale or 0.5) / 4  # heads of 4 columns in the base, 16 here
    keys = ("model.residual_scale=0.5", f"model.logit_scale={1 / WIDTH}", f"model.attention.scale={scale}")
    by_hand: Any = tiny_model(tiny(*wide[:-1] if own_scale else wide, *keys))
    exported: Any = tiny_model(replace(config, model=without_mup(config.model)))
    into_residual = re.compile(r"(linear_(proj|fc2)|to_hidden)\.weight|\.down$")
    for (name, weight), theirs in zip(model.named_parameters(), by_hand.named_parameters(), strict=True):
        depth = math.sqrt(2) if into_residual.search(name) else 1  # the base model's 1 / sqrt(2 L)
        torch.testing.assert_close(weight, theirs[1] * row(name)[0] * depth, msg=name)
    logits = []
    for other in (model, by_hand, exported):
        other.load_state_dict(model.state_dict())
        logits.append(other.whole_logits(TOKENS, POSITIONS))
    torch.testing.assert_close(logits[1], logits[0])
    torch.testing.assert_close(logits[2], logits[0])
    plain: Any = tiny_model(tiny(*wide))
    plain.load_state_dict(model.state_dict())
    assert (plain.whole_logits(TOKENS, POSITIONS) - logits[0]).abs().max() > 0.1


@pytest.mark.parametrize(("name", "scale"), [("adamw", ""), ("muon", "moonlight"), ("muon", "spectral")])
def test_rates_and_decays_are_those_of_the_table(one_rank: None, name: str, scale: str) -> None:
    groups = r"[{pattern: 'experts\.up', lr_scale: 3.0, weight_decay: 0.2}]"
    muon = [f"optimizer.muon.update_scale={scale}"] if scale else []
    config = tiny(*WIDE, MUP, f"optimizer.name={name}", f"optimizer.groups={groups}", *muon)
    model = tiny_model(config)
    names = {parameter: name for name, parameter in model.named_parameters()}
    seen = set()
    for group in parameter_groups(model, config.optimizer, config.model):
        for parameter in group["params"]:
            _, of_adamw, moonlight, spectral = row(names[parameter])
            of_muon = moonlight if scale == "moonlight" else spectral
            factor = of_adamw if name == "adamw" or of_muon is None else of_muon
            chosen = "experts.up" in names[parameter]
            is_vector = parameter.dim() < 2 or names[parameter].endswith("zero.vector")
            decay = 0.2 if chosen else 0.0 if is_vector else 0.1
            assert bool(group.get("muon")) == (name == "muon" and of_muon is not None), names[parameter]
            assert group["lr_scale"] == pytest.approx((3.0 if chosen else 1.0) * factor), names[parameter]
            # A step decays a weight by lr * decay as in the base model.
            assert group["weight_decay"] * factor == pytest.approx(decay), names[parameter]
            seen.add(names[parameter])
    assert seen == set(names.values())


@pytest.mark.parametrize("experts", [BASE * WIDTH, 8])
def test_rates_of_a_router_do_not_depend_on_how_many_experts_there_are(experts: int) -> None:
    """With as many experts as columns an entry for each expert looks like one for each column."""
    of_experts = {"router.scorer.bias": (experts,), "router.residual.weight": (experts, experts)}
    of_hidden = {"router.scorer.weight": (experts, BASE * WIDTH), "shared.gate": (BASE * WIDTH,)}
    for names, expected in ((of_experts, (0.0, 0.0)), (of_hidden, (1.0, 0.5))):
        for name, shape in names.items():
            found = width_powers(f"decoder.layers.0.mlp.{name}", torch.empty(shape), BASE * WIDTH)
            assert found == expected, name
