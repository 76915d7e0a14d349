"""Dispatch: the rows by hand, and the exchange in a world of one rank against the local path."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.moe.dispatch.direct import DirectDispatch
from megamoe.moe.dispatch.dispatcher import DispatchConfig, LocalDispatch
from megamoe.moe.process_groups import ParallelGroups
from megamoe.moe.routing import Routing
from tests.support.moe.build import make_hidden, make_pairs, make_scored, routed


@pytest.fixture(scope="module")
def alone() -> Iterator[dist.ProcessGroup]:
    """A gloo group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def of_group(group: dist.ProcessGroup) -> DirectDispatch:
    return DirectDispatch(None, DispatchConfig(4, ParallelGroups(expert=group)))


def make_routing(experts: list[list[int]], weights: list[list[float]]) -> Routing:
    pairs = make_pairs(experts, weights)
    pairs.weight_N.requires_grad_()
    return routed(make_scored(torch.zeros(len(experts), 4)), pairs)


CASES: dict[str, tuple[list[list[int]], list[list[float]]]] = {
    "uneven": ([[2, 0], [2], [], [0, 2, 3]], [[0.5, 2.0], [1.0], [], [3.0, 0.25, 1.5]]),
    "one expert": ([[1], [1]], [[1.0], [2.0]]),
    "no pairs": ([[], []], [[], []]),
    "no tokens": ([], []),
}


def test_rows_are_grouped_by_expert_in_token_order() -> None:
    routing, hidden_TH = make_routing(*CASES["uneven"]), make_hidden(4)
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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_exchange_of_one_rank_equals_the_local_path(
    alone: dist.ProcessGroup, case: tuple[list[list[int]], list[list[float]]]
) -> None:
    results: list[list[Tensor]] = []
    for dispatcher in (
        LocalDispatch(),
        DirectDispatch(None, DispatchConfig(4, ParallelGroups(expert=alone))),
    ):
        routing, hidden_TH = make_routing(*case), make_hidden(len(case[0])).requires_grad_()
        rows_NH, counts_E, plan = dispatcher.dispatch(hidden_TH, routing)
        output_TH = dispatcher.combine(rows_NH.square(), plan)
        gradients = torch.autograd.grad((output_TH**2).sum(), [hidden_TH, routing.pairs.weight_N])
        results.append([rows_NH, counts_E, output_TH, *gradients])
    for local, exchanged in zip(*results, strict=True):
        assert torch.equal(local, exchanged)


def count_collectives(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the exchanges as they are made."""
    calls: list[str] = []
    real = dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append("all_to_all_single")
        return real(*args, **kwargs)

    monkeypatch.setattr(dist, "all_to_all_single", counted)
    return calls


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_local_routing_sends_nothing(
    alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, case: tuple[list[list[int]], list[list[float]]]
) -> None:
    calls = count_collectives(monkeypatch)
    results: list[list[Tensor]] = []
    for is_local in (True, False):
        routing, hidden_TH = make_routing(*case), make_hidden(len(case[0])).requires_grad_()
        routing.is_local = is_local
        dispatcher = of_group(alone)
        rows_NH, counts_E, plan = dispatcher.dispatch(hidden_TH, routing)
        output_TH = dispatcher.combine(rows_NH.square(), plan)
        gradients = torch.autograd.grad((output_TH**2).sum(), [hidden_TH, routing.pairs.weight_N])
        results.append([rows_NH, counts_E, output_TH, *gradients])
        assert bool(calls) != is_local
    for home, exchanged in zip(*results, strict=True):
        assert torch.equal(home, exchanged)
