"""Dropout in the experts: rates, scaling, keys, the same masks in any order of the rows, when it is off."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megamoe.moe.experts.dropout import ExpertDropout
from megamoe.moe.layer import MoELayer
from megamoe.moe.part import StepContext
from tests.support.moe.build import FFN, HIDDEN, make_context, make_hidden, make_layer, moe_config, set_tokens

ONE = {"k": 1, "weights": "one"}
ALL_WITH_ONE = {"selector": {"k": 4, "weights": "one"}}


def make_dropout(num_rows: int, output: float = 0.0, activation: float = 0.0, step: int = 0) -> ExpertDropout:
    def draw_key(purpose: str) -> int:
        return StepContext(step=step).draw_key(1, purpose)

    return ExpertDropout(output, activation, torch.arange(num_rows), draw_key)


def masks(layer: MoELayer, hidden_TH: Tensor) -> list[Tensor]:
    """[T, E, H] bool: which elements of each expert's output were dropped, once for each forward pass."""
    seen: list[Tensor] = []
    real = ExpertDropout.on_output

    def watched(dropout: ExpertDropout, rows_NH: Tensor) -> Tensor:
        dropped_NH = real(dropout, torch.ones_like(rows_NH)) == 0
        seen.append(dropped_NH.view(layer.num_experts, len(hidden_TH), -1).transpose(0, 1))
        return real(dropout, rows_NH)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertDropout, "on_output", watched)
        layer(hidden_TH)
    return seen


@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_the_share_dropped_and_the_mean_kept(rate: float) -> None:
    dropout = make_dropout(200, output=rate, activation=rate)
    for rows in (dropout.on_output(torch.ones(200, 50)), dropout.on_activation(torch.ones(200, 50), 1)):
        kept = rows[rows != 0]
        torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - rate)))
        # Five standard deviations of a share among 10 000 draws.
        assert (rows == 0).float().mean().item() == pytest.approx(rate, abs=5 * (rate / 1e4) ** 0.5)


def test_every_purpose_step_sub_layer_and_row_draws_for_itself() -> None:
    ones, dropout = torch.ones(20, 30), make_dropout(20, 0.5, 0.5)
    drawn = [
        dropout.on_output(ones),
        dropout.on_activation(ones, 1),
        dropout.on_activation(ones, 2),
        make_dropout(20, 0.5, 0.5, step=1).on_output(ones),
    ]
    for place, one in enumerate(drawn):
        assert not any(torch.equal(one, other) for other in drawn[:place])
        assert len({tuple(row.tolist()) for row in one}) == 20
    assert torch.equal(dropout.on_output(ones), drawn[0])


def test_a_rows_draws_do_not_depend_on_its_position() -> None:
    dropout, place_N = make_dropout(5, 0.5), torch.tensor([7, 1, 2, 0, 5])
    spread = dropout.spread(place_N, 9)
    assert torch.equal(spread.on_output(torch.ones(9, 30))[place_N], dropout.on_output(torch.ones(5, 30)))


def test_the_layer_keys_by_token_and_expert() -> None:
    """All four experts are chosen: the dropout depends on the tokens' indices, not on their order in the
    batch.
    """
    context = make_context(token_index_T=torch.tensor([5, 3, 1 << 48, 11]))
    layer = make_layer(moe_config(num_experts=4, expert_output_dropout=0.5, router=ALL_WITH_ONE), context)
    hidden_TH = make_hidden(4)
    (dropped_TEH,) = masks(layer, hidden_TH)
    assert len({tuple(row.tolist()) for row in dropped_TEH.flatten(0, 1)}) == 16
    set_tokens(context, token_index_T=torch.tensor([1 << 48, 5]))
    (again_TEH,) = masks(layer, hidden_TH[:2])
    assert torch.equal(again_TEH, dropped_TEH[[2, 0]])
    context.step += 1
    assert not torch.equal(masks(layer, hidden_TH[:2])[0], again_TEH)


def test_the_output_is_the_sum_of_what_is_kept() -> None:
    tree: dict[str, Any] = {"num_experts": 4, "router": ALL_WITH_ONE}
    layer = make_layer(moe_config(**tree, expert_output_dropout=0.5, num_shared_experts=1))
    hidden_TH = make_hidden(6)
    (dropped_TEH,) = masks(layer, hidden_TH)
    inner_TEF = torch.einsum("th,efh->tef", hidden_TH, layer.experts.up)
    inner_TEF = functional.silu(inner_TEF[..., :FFN]) * inner_TEF[..., FFN:]
    outputs_TEH = torch.einsum("tef,ehf->teh", inner_TEF, layer.experts.down)
    expected_TH = (2 * outputs_TEH * ~dropped_TEH).sum(1)
    assert layer.shared is not None  # which knows no dropout
    expected_TH = layer.shared.join(hidden_TH, layer.shared(hidden_TH), expected_TH)
    torch.testing.assert_close(layer(hidden_TH), expected_TH, rtol=1e-4, atol=1e-4)


def test_activation_dropout_stands_between_the_products() -> None:
    layer = make_layer(moe_config(num_experts=1, expert_activation_dropout=0.5, router={"selector": ONE}))
    hidden_TH = make_hidden(3)
    up, down = (layer.get_parameter(f"experts.{name}")[0] for name in ("up", "down"))
    inner_TF = hidden_TH @ up.T
    inner_TF = functional.silu(inner_TF[:, :FFN]) * inner_TF[:, FFN:]
    dropped_TF = make_dropout(3, activation=0.5).on_activation(inner_TF, 1)
    assert 0 < (dropped_TF == 0).sum() < dropped_TF.numel()
    torch.testing.assert_close(layer(hidden_TH), dropped_TF @ down.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "rates", [{"expert_output_dropout": 0.5}, {"expert_activation_dropout": 0.5}], ids=str
)
@pytest.mark.parametrize("sublayers", [1, 2])
def test_only_in_training_and_repeatable(rates: dict[str, float], sublayers: int) -> None:
    layer = make_layer(moe_config(num_experts=4, expert_sublayers=sublayers, **rates))
    plain = make_layer(moe_config(num_experts=4, expert_sublayers=sublayers))
    hidden_TH = make_hidden(8)
    assert torch.equal(layer(hidden_TH), layer(hidden_TH))
    assert not torch.allclose(layer(hidden_TH), plain(hidden_TH))
    assert torch.equal(layer.eval()(hidden_TH), plain(hidden_TH))


def test_each_sub_layer_draws_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def on_activation(_: ExpertDropout, rows: Tensor, sublayer: int, first_column: int) -> Tensor:
        seen.append(sublayer)
        return rows

    monkeypatch.setattr(ExpertDropout, "on_activation", on_activation)
    layer = make_layer(moe_config(num_experts=4, expert_sublayers=3, expert_activation_dropout=0.5))
    layer(make_hidden(4))
    assert seen == [1, 2, 3]


def test_in_bf16s_padded_groups_the_same_elements_are_dropped() -> None:
    layer = make_layer(moe_config(num_experts=4, expert_activation_dropout=0.5, router={"selector": ONE}))
    hidden_TH = make_hidden(40).bfloat16()
    fp32_TH = layer.bfloat16().float()(hidden_TH.float())
    bf16_TH = layer.bfloat16()(hidden_TH)
    assert (bf16_TH.float() - fp32_TH).norm() < 0.02 * fp32_TH.norm()


def test_it_costs_nothing_if_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(moe_config(num_experts=4))
    monkeypatch.setattr(layer.dispatcher, "dispatch_values", None)
    assert layer(make_hidden(4)).shape == (4, HIDDEN)
    layer.dropout = (0.1, 0.0)
    with pytest.raises(TypeError):
        layer(make_hidden(4))
    assert layer.eval()(make_hidden(4)).shape == (4, HIDDEN)
