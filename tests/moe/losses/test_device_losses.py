"""`device_balance` and `communication_balance`: by hand, and DeepSeek-V2's formulas sequence by sequence."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.moe.part import StepContext
from megamoe.moe.routing import Routing
from tests.support.moe.build import assert_alike, make_context, make_part, make_routing

NAMES = ["device_balance", "communication_balance"]
SEQUENCES = torch.tensor([40, 41, 42])


def make(name: str, num_experts: int = 4, **options: Any) -> Any:
    if name == "communication_balance":
        options.setdefault("keep", 1)
    return make_part("loss", name, num_experts, **{"num_groups": 2, **options})


def routing_of(experts: list[list[int]], affinities_TE: Tensor) -> Routing:
    """Return a routing whose masked probabilities differ from the score function's values over all
    experts.
    """
    routing = make_routing(experts, affinities_TE, affinities_TE * 0.3)
    routing.affinities_TE = affinities_TE
    return routing


def test_device_balance_by_hand() -> None:
    # Four pairs, three of them on the first device: f' = 2 (3/4, 1/4). P' = (0.8 + 0.6) / 2, (0.2 + 0.4) / 2.
    probs_TE = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.3, 0.3, 0.2, 0.2]])
    value = make("device_balance")(routing_of([[0, 1], [1, 2]], probs_TE), StepContext())
    assert value.item() == pytest.approx(1.5 * 0.7 + 0.5 * 0.3)


def test_communication_balance_by_hand() -> None:
    # The first device gets both tokens, one of them for two experts; the second gets one: f'' = (2, 1) / M.
    probs_TE = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.3, 0.3, 0.2, 0.2]])
    routing = routing_of([[0, 1], [1, 2]], probs_TE)
    for keep in (1, 2):
        value = make("communication_balance", keep=keep)(routing, StepContext())
        assert value.item() == pytest.approx((2 * 0.7 + 1 * 0.3) / keep)


def plain(
    name: str, experts: list[list[int]], affinities_TE: Tensor, sequences: int, groups: int, keep: int
) -> Tensor:
    """Compute section 2.2.3 literally, with K choices of every token; token s * B + b is of sequence b."""
    num_experts, k = affinities_TE.shape[1], len(experts[0])
    size = num_experts // groups
    total: Any = 0
    for b in range(sequences):
        tokens = range(b, len(experts), sequences)
        length = len(tokens)
        f = [num_experts / (k * length) * sum(e in experts[t] for t in tokens) for e in range(num_experts)]
        p = sum((affinities_TE[t] / affinities_TE[t].sum() for t in tokens), torch.zeros(())) / length
        for d in range(groups):
            members = range(d * size, (d + 1) * size)
            if name == "device_balance":
                factor = sum(f[e] for e in members) / size
            else:
                sent = sum(any(e in members for e in experts[t]) for t in tokens)
                factor = groups / (keep * length) * sent
            total = total + factor * sum(p[e] for e in members)
    return torch.as_tensor(total / sequences)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_value_and_gradient_of_the_paper(name: str, sequences: int, score_function: str) -> None:
    generator = torch.Generator().manual_seed(7)
    scores_TE = torch.randn(12, 12, generator=generator, dtype=torch.float64) + torch.linspace(0, 2, 12)
    context = make_context(sample_index_B=SEQUENCES[:sequences])
    options = {"keep": 2} if name == "communication_balance" else {}
    experts = scores_TE.topk(3).indices.tolist()
    probs = torch.softmax if score_function == "softmax" else lambda scores_TE, dim: scores_TE.sigmoid()
    part = make(name, 12, num_groups=4, **options)
    assert_alike(
        lambda s_TE: part(routing_of(experts, probs(s_TE, 1)), context),
        lambda s_TE: plain(name, experts, probs(s_TE, 1), sequences, 4, keep=2),
        scores_TE,
        rtol=1e-6,
        atol=1e-9,
        check_dtype=False,
    )


@pytest.mark.parametrize("name", NAMES)
def test_at_balance_it_is_1_for_any_number_of_experts_a_token(name: str) -> None:
    experts = [[0, 1], [2], [3, 2], [1]]
    value = make(name)(routing_of(experts, torch.full((4, 4), 0.25)), StepContext())
    assert value.item() == pytest.approx(1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("samples", [None, SEQUENCES])
def test_without_tokens_or_pairs_it_is_0(name: str, samples: Tensor | None) -> None:
    context = make_context(sample_index_B=samples)
    assert make(name)(routing_of([], torch.zeros(0, 4)), context).item() == 0
    assert make(name)(routing_of([[]] * 3, torch.zeros(3, 4)), context).item() == 0
