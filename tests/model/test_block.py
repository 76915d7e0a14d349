"""An MoE layer after a block: its position, its input and its output."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.model.architectures.decoder import GPT
from megamoe.moe.part import StepContext
from tests.support.tiny import VOCABULARY, tiny, tiny_gpt

S = 8
TOKENS = torch.arange(2 * S).view(2, S) * 5 % VOCABULARY
POSITIONS = torch.arange(S).expand(2, S)
SQUASHED = "moe.output_activation=sigmoid"
WIDE = ["model.num_layers=3", "model.init_std=0.3"]


def inserted(*overrides: str) -> GPT:
    return tiny_gpt(tiny(*WIDE, "moe.layers={insert_after: [2]}", *overrides))


def by_hand(model: GPT, *overrides: str) -> Tensor:
    """Logits of the dense model, in which h := h + layer(norm(h)) is put behind the second block."""
    dense = tiny_gpt(tiny(*WIDE, "moe.layers=none", *overrides))
    ((number, layer),) = model.moe_layers()
    assert number == 2
    block = model.model.decoder.layers[1]

    def after(module: Any, inputs: Any, output: Any) -> Any:
        hidden_SBH, context = output
        flat_TH = hidden_SBH.flatten(0, 1)
        read_TH = flat_TH if block.inserted.norm is None else block.inserted.norm(flat_TH)
        output_TH = layer(read_TH).sigmoid() if SQUASHED in overrides else layer(read_TH)
        return (flat_TH + output_TH).view_as(hidden_SBH), context

    dense.model.decoder.layers[1].register_forward_hook(after)
    return dense.whole_logits(TOKENS, POSITIONS)


@pytest.mark.parametrize(
    "overrides", [[], ["model.norm=layernorm"], ["moe.num_shared_experts=1"], [SQUASHED]], ids=str
)
def test_it_stands_after_its_block_behind_a_norm(one_rank: None, overrides: list[str]) -> None:
    model = inserted(*overrides)
    norm = model.model.decoder.layers[1].inserted.norm
    assert (norm.bias is not None) == (overrides == ["model.norm=layernorm"])
    with torch.no_grad():
        norm.weight.mul_(torch.linspace(0.5, 2, len(norm.weight)))
    logits = model.whole_logits(TOKENS, POSITIONS)
    torch.testing.assert_close(logits, by_hand(model, *overrides), rtol=1e-4, atol=1e-4)
    dense = tiny_gpt(tiny(*WIDE, "moe.layers=none", *overrides)).whole_logits(TOKENS, POSITIONS)
    assert (logits - dense).abs().max() > 0.1


def test_with_sub_layers_it_reads_the_residual_stream_itself(one_rank: None) -> None:
    model = inserted("moe.expert_sublayers=2")
    assert model.model.decoder.layers[1].inserted.norm is None
    read: list[Tensor] = []
    written: list[Tensor] = []
    model.model.decoder.layers[1].inserted.layer.register_forward_pre_hook(
        lambda _, inputs: read.append(inputs[0])
    )
    model.model.decoder.layers[1].mlp.register_forward_hook(lambda _, __, output: written.append(output[0]))
    logits = model.whole_logits(TOKENS, POSITIONS)
    torch.testing.assert_close(logits, by_hand(model), rtol=1e-4, atol=1e-4)
    assert read[0].std() > 1.1 * written[0].std()  # not what a norm gives, but the sum of all so far


def test_norms_have_the_models_eps(one_rank: None) -> None:
    overrides = ["moe.expert_sublayers=2", "model.norm_eps=0.25"]
    ((_, layer),) = inserted(*overrides).moe_layers()
    assert [norm.eps for norm in layer.experts.get_submodule("norms").children()] == [0.25, 0.25]
    assert inserted("model.norm_eps=0.25").model.decoder.layers[1].inserted.norm.eps == 0.25


def test_every_layer_draws_by_its_own_number(one_rank: None) -> None:
    overrides = ["model.num_layers=3", "moe.layers={at: [3], insert_after: [1]}"]
    layers = dict(tiny_gpt(tiny(*overrides), StepContext()).moe_layers())
    assert list(layers) == [1, 3]
    assert [layer.router.dims.layer for layer in layers.values()] == [1, 3]
    first, second = (layers[block].get_parameter("experts.up") for block in (1, 3))
    assert not torch.equal(first, second)
