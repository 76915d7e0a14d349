"""Dispatch without an exchange: the rows by hand; tests/distributed/parity/test_dispatch.py has exchanges."""

import torch

from megamoe.moe.dispatch.dispatcher import LocalDispatch
from megamoe.moe.routing import Routing
from tests.support.moe.build import make_hidden, make_pairs, make_scored, routed


def make_routing(experts: list[list[int]], weights: list[list[float]]) -> Routing:
    pairs = make_pairs(experts, weights)
    pairs.weight_N.requires_grad_()
    return routed(make_scored(torch.zeros(len(experts), 4)), pairs)


def test_rows_are_grouped_by_expert_in_token_order() -> None:
    weights = [[0.5, 2.0], [1.0], [], [3.0, 0.25, 1.5]]
    routing, hidden_TH = make_routing([[2, 0], [2], [], [0, 2, 3]], weights), make_hidden(4)
    rows_NH, counts_E, plan = LocalDispatch().dispatch(hidden_TH, routing)
    assert counts_E.tolist() == [2, 0, 3, 1]
    assert torch.equal(rows_NH, hidden_TH[[0, 3, 0, 1, 3, 3]])
    output_TH = LocalDispatch().combine(rows_NH, plan)
    expected_TH = hidden_TH * torch.tensor([[2.5], [1.0], [0.0], [4.75]])
    torch.testing.assert_close(output_TH, expected_TH)


def test_the_sum_over_experts_is_fp32() -> None:
    """256 + 1 + 1 in bf16 would stay at 256, whose neighbour is 258."""
    routing = make_routing([[0, 1, 2]], [[1.0, 1.0, 1.0]])
    rows_NH, _, plan = LocalDispatch().dispatch(torch.ones(1, 8, dtype=torch.bfloat16), routing)
    rows_NH = rows_NH * torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    output_TH = LocalDispatch().combine(rows_NH, plan)
    assert output_TH.dtype == torch.bfloat16
    assert output_TH.tolist() == [[258.0] * 8]
