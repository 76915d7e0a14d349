"""Equal values: every kernel and every device chooses the same experts and drops the same pairs.

Values are equal by mathematics where scores are equal, and where the scores of one token are those of another
in another order. In fp32 the sums over such rows differ in their last bits, in each kernel differently.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe import registry
from megamoe.kernels.choice import Kernels
from megamoe.kernels.router import largest, top_k
from megamoe.moe.layer import MoELayer
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Routing
from tests.support.moe.build import VOCAB, make_context, make_hidden, make_layer, moe_config, set_tokens
from tests.support.moe.part_layers import moe_tree

TOKENS = 128
PLAIN, COMPILED = Kernels(compiled=False), Kernels()
PARTS = [
    *(("selector", name) for name in registry.list_parts("selector")),
    *(("capacity", name) for name in registry.list_parts("capacity")),
    *(("mask", name) for name in registry.list_parts("mask")),
]
PRIORITIES = ("probability", "choice_then_probability", "batch_prioritised")


def routing_of(layer: MoELayer, hidden_TH: Tensor) -> Routing:
    context = make_context(seed=7, step=3, sample_index_B=torch.arange(4))
    set_tokens(context, token_ids_T=torch.arange(TOKENS) % VOCAB)
    return layer.router(hidden_TH, context)


def assert_same_pairs(layers: list[MoELayer], hidden_TH: Tensor) -> Routing:
    first, second = (routing_of(layer, hidden_TH) for layer in layers)
    for one, other in ((first.wanted, second.wanted), (first.pairs, second.pairs)):
        assert torch.equal(one.token_N, other.token_N) and torch.equal(one.expert_N, other.expert_N)
        torch.testing.assert_close(one.weight_N, other.weight_N)
    return first


def both(tree: dict[str, Any], other: Kernels = COMPILED) -> list[MoELayer]:
    return [make_layer(moe_config(**tree), kernels=kernels) for kernels in (PLAIN, other)]


def permuted(num_experts: int) -> Tensor:
    """Scores [T, E]: the same few values in every row, in other places."""
    draws = torch.Generator().manual_seed(3)
    row_E = torch.arange(num_experts).remainder(4) * 0.3
    return torch.stack([row_E[torch.randperm(num_experts, generator=draws)] for _ in range(TOKENS)])


@pytest.mark.parametrize(("kind", "name"), PARTS, ids=lambda value: value)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_kernels_choose_alike_where_scores_tie(kind: str, name: str, training: bool) -> None:
    """All tokens are equal: with the scorer's own values, and with those of other rows in another order."""
    tree = moe_tree(kind, name)
    layers = both(tree)
    for layer in layers:
        layer.train(training)
    assert_same_pairs(layers, make_hidden(1).expand(TOKENS, -1).contiguous())
    assert_same_pairs(layers, torch.zeros_like(make_hidden(TOKENS)))
    scores_TE = permuted(tree["num_experts"])
    for layer in layers:
        forward = layer.router.scorer.forward

        def tied(hidden_TH: Tensor, context: StepContext, forward: Any = forward) -> Any:
            found = forward(hidden_TH, context)
            return (scores_TE, found[1]) if isinstance(found, tuple) else scores_TE

        layer.router.scorer.forward = tied
    assert_same_pairs(layers, make_hidden(TOKENS))


@pytest.mark.parametrize("priority", PRIORITIES)
def test_a_tie_between_hashed_tokens_goes_to_the_earlier_pair(priority: str) -> None:
    assert_hashed_ties(priority)


def assert_hashed_ties(priority: str, other: Kernels = COMPILED) -> None:
    """Three tables give each token its experts; p is the same for all tokens with as many of them."""
    capacity = {"name": "per_expert", "factor": 0.8, "priority": priority}
    router = {"scorer": "hash", "selector": {"name": "table", "k": 3}, "capacity": capacity}
    layers = both({"num_experts": 12, "router": router, "losses": "none"}, other)
    routing = assert_same_pairs(layers, make_hidden(TOKENS))
    table_TK = routing.extras["table_TK"]
    distinct_T = torch.tensor([len(set(row)) for row in table_TK.tolist()])
    wanted = routing.wanted
    kept = set(zip(routing.pairs.token_N.tolist(), routing.pairs.choice_N.tolist(), strict=True))
    for expert in range(12):
        here = wanted.expert_N == expert
        rows = list(zip(wanted.token_N[here].tolist(), wanted.choice_N[here].tolist(), strict=True))
        # p of a chosen expert is larger where the tables agree, for fewer experts then share the token.
        key = {
            "probability": lambda row: (int(distinct_T[row[0]]), *row),
            "choice_then_probability": lambda row: (row[1], int(distinct_T[row[0]]), *row),
            "batch_prioritised": lambda row: (row[1], int(distinct_T[row[0]]), *row),
        }[priority]
        slots = sum(row in kept for row in rows)
        assert sorted(rows, key=key)[:slots] == sorted((row for row in rows if row in kept), key=key)
    assert 0 < len(kept) < len(wanted.token_N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_of_equal_values_is_taken(dtype: torch.dtype) -> None:
    values = torch.tensor(
        [[1.0, 2.0, 2.0, -0.0, 0.0, 2.0], [float("-inf")] * 5 + [float("nan")]], dtype=dtype
    )
    assert largest(values, 5).tolist() == [[1, 2, 5, 0, 3], [5, 0, 1, 2, 3]]
    drawn = torch.randint(-3, 4, (50, 40), generator=torch.Generator().manual_seed(1)).to(dtype)
    stable = drawn.sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(largest(drawn, 9), stable[:, :9])
    assert torch.equal(largest(drawn.T, 9), drawn.T.sort(dim=-1, descending=True, stable=True).indices[:, :9])
    if dtype == torch.float32:
        for kernels in (PLAIN, COMPILED):
            assert torch.equal(top_k(drawn, 6, kernels), stable[:, :6])
