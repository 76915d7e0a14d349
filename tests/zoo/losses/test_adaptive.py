"""Losses whose coefficient follows the batch: by hand, once per micro batch, and kept."""

import math
from typing import Any

import pytest
import torch

from megamoe.moe.part import StepContext
from tests.support.moe.build import (
    make_context,
    make_hidden,
    make_layer,
    make_pairs,
    make_part,
    make_routing,
    moe_config,
)

PROBS = torch.tensor([[0.5, 2.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
LOAD = torch.zeros(4, dtype=torch.int64)


def value_of(loss: Any, experts: list[list[int]], micro_batch: int = 0, step: int = 1) -> float:
    routing = make_routing(experts, PROBS, PROBS)
    return float(loss(routing, make_context(step=step, micro_batch=micro_batch)))


def test_relu_sparsity_by_hand() -> None:
    """Mean p: 0.25 and 1.5. f = E / (k T) counts: 4 / (2 * 2) * (1, 2)."""
    plain = make_part("loss", "relu_sparsity", k=2.0, balance=False)
    assert value_of(plain, [[1, 0], [1]]) == 1.75
    assert value_of(make_part("loss", "relu_sparsity", k=2.0), [[1, 0], [1]]) == 0.25 * 1 + 1.5 * 2


@pytest.mark.parametrize(("k", "sign"), [(2.0, -1), (1.5, 0), (1.0, 1)])
def test_lambda_follows_the_sparsity_of_the_batch(k: float, sign: int) -> None:
    """Three pairs of two tokens: S = 5/8."""
    assert sign == math.copysign(1, (1 - k / 4) - 5 / 8) or (1 - k / 4) == 5 / 8
    loss = make_part("loss", "relu_sparsity", k=k, weight=1e-8)
    value_of(loss, [[1, 0], [1]])
    loss.after_step(LOAD, StepContext(step=1))
    assert loss.metrics()["coefficient"].item() == pytest.approx(1e-8 * 1.2**sign)


def test_lambda_rises_again_after_many_steps_below_k() -> None:
    """1.2^-700 is far below the numbers of fp32, of which 1.2 times the least is the least."""
    loss = make_part("loss", "relu_sparsity", k=2.0)
    few, many = torch.tensor([1, 100]), torch.tensor([1000, 100])
    least, most = torch.ones(()), torch.ones(())
    for _ in range(700):
        least, most = loss.adapted(least, few), loss.adapted(most, many)
    assert float(loss.adapted(least, many)) == pytest.approx(1.2 * float(least)) and least > 0
    assert most.isfinite()


def test_a_recomputed_micro_batch_counts_once_and_others_add() -> None:
    """Three of the first micro batch's four pairs are dropped; counted twice it would be 6 of 12."""
    loss = make_part("loss", "drop_rate_balance", xi=1.0, beta=0.0, most=1.0, weight=0.5)
    for number, kept in ((0, 1), (1, 4), (0, 1)):
        routing = make_routing([[0, 1], [2, 3]], PROBS, PROBS)
        routing.pairs = routing.wanted.keep(torch.arange(4) < kept)
        loss(routing, make_context(step=3, micro_batch=number))
    loss.after_step(LOAD, StepContext(step=3))
    assert loss.metrics()["coefficient"].item() == pytest.approx(3 / 8)  # 3 of 8 pairs dropped


@pytest.mark.parametrize("pad", [False, True])
def test_places_that_stay_empty_are_not_dropped_pairs(pad: bool) -> None:
    """With fixed shares each expert has as many rows as its capacity, some of them empty."""
    capacity = {"name": "per_expert", "factor": 1.25, "pad": pad}
    router = {"scorer": "linear", "selector": {"name": "top_k", "k": 2}, "capacity": capacity}
    layer = make_layer(moe_config(num_experts=4, router=router, losses={"drop_rate_balance": 0.01}))
    layer(make_hidden(24))
    found = layer.observation
    assert found is not None
    loss: Any = layer.losses["drop_rate_balance"]
    (counts,) = loss._counts.values()
    dropped = int((found.wanted_E - found.load_E).sum())
    assert counts.tolist() == [dropped, 48] and dropped > 0


def test_the_drop_rate_moves_the_coefficient_by_hand() -> None:
    loss = make_part("loss", "drop_rate_balance")
    routing = make_routing([[0, 1], [2, 3]], PROBS, PROBS)
    routing.pairs = make_pairs([[0, 1], [2]])
    first = float(loss(routing, StepContext(step=1)))
    loss.after_step(LOAD, StepContext(step=1))  # a quarter dropped: xi d = 0.05, limited to 0.01
    assert loss.coefficient.item() == pytest.approx(1)
    routing.pairs = routing.wanted
    loss(routing, StepContext(step=2))
    loss.after_step(LOAD, StepContext(step=2))
    assert loss.coefficient.item() == pytest.approx(0.99)
    shares_TE = PROBS / PROBS.sum(1, keepdim=True)
    assert first == pytest.approx(4 * (shares_TE.mean(0) * 0.25).sum().item())
    assert float(loss(routing, StepContext(step=3))) == pytest.approx(0.99 * first)


def test_evaluation_and_steps_that_were_not_applied_leave_no_trace() -> None:
    loss = make_part("loss", "relu_sparsity", k=1.0).eval()
    value_of(loss, [[1, 0], [1]])
    loss.after_step(LOAD, StepContext(step=1))
    assert loss.coefficient == 1
    loss.train()
    value_of(loss, [[1, 0], [1]], step=1)  # this step ends without after_step
    value_of(loss, [[], [1]], micro_batch=1, step=2)
    loss.after_step(LOAD, StepContext(step=2))
    assert loss.coefficient.item() == pytest.approx(1 / 1.2)


def test_it_holds_the_number_of_experts_at_k() -> None:
    """From 8 of 16 experts to 4: lambda grows until p falls, and then settles."""
    loss = make_part("loss", "relu_sparsity", 16, k=4.0, weight=1e-3)
    scores_TE = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    widths = []
    for step in range(1, 200):
        probs_TE = scores_TE.relu()
        chosen = [row.nonzero().flatten().tolist() for row in probs_TE]
        widths.append(sum(map(len, chosen)) / 64)
        value = loss(make_routing(chosen, scores_TE, probs_TE), StepContext(step=step))
        pull = ((scores_TE - 0.3).square().mean() + 1e-3 * value).requires_grad_()
        (gradient,) = torch.autograd.grad(pull, scores_TE)
        scores_TE = (scores_TE - 20 * gradient).detach().requires_grad_()
        loss.after_step(LOAD, StepContext(step=step))
    mean = sum(widths[100:]) / len(widths[100:])
    assert widths[0] > 7 and 2.5 < mean < 6
