"""Choices whose number is known are made without a look at the device."""

import pytest
import torch
from torch import Tensor

from megamoe.config import parse_config
from megamoe.moe.part import Dims, StepContext
from megamoe.moe.router import Router
from megamoe.moe.routing import Pairs, Routing

EXPERTS, HIDDEN, TOKENS = 8, 16, 12


def router(**changes: object) -> Router:
    """A router of top-k among EXPERTS with these changes of `moe.router`."""
    tree = {"moe": {"num_experts": EXPERTS, "router": changes}, "data": {"mock": True}}
    return Router(parse_config(tree).moe.router, Dims(HIDDEN, EXPERTS))


def routed(made: Router) -> Routing:
    """A micro batch through it."""
    hidden_TH = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    return made(hidden_TH, StepContext(seed=1))


def refuse(*unused: object, **also_unused: object) -> Tensor:
    raise AssertionError("the host would wait for the number of pairs")


LIMIT = {"name": "group_limit", "num_groups": 4, "keep": 2}
DROPOUT = {"name": "expert_dropout", "cluster_size": 4}


@pytest.mark.parametrize("masks", [[], [LIMIT], [DROPOUT]])
def test_top_k_under_a_mask_that_leaves_enough_does_not_wait(
    masks: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = router(selector={"name": "top_k", "k": 2}, masks=masks)
    expected = routed(made)
    made.least_candidates = 0  # as if nothing were known
    by_masks = routed(made)
    made = router(selector={"name": "top_k", "k": 2}, masks=masks)
    monkeypatch.setattr(Tensor, "nonzero", refuse)
    pairs = routed(made).pairs
    assert pairs.each == 2
    for name in ("token_N", "expert_N", "weight_N", "choice_N"):
        assert torch.equal(getattr(pairs, name), getattr(expected.pairs, name))
        assert torch.equal(getattr(pairs, name), getattr(by_masks.pairs, name))


def test_a_token_with_fewer_candidates_than_choices_keeps_fewer_pairs() -> None:
    masks = [{"name": "entropy_prune", "num_groups": 2, "bound": 0.0}]
    weights = {"name": "top_k", "k": 3, "weights": "raw"}
    pairs = routed(router(selector=weights, masks=masks)).pairs
    assert pairs.each is None
    assert len(pairs.token_N) == 2 * TOKENS


def test_a_rank_s_share_of_pairs_of_one_number_is_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    expert_TK = torch.randint(EXPERTS, (TOKENS, 3))
    weight_TK = torch.rand(TOKENS, 3, requires_grad=True)
    known = Pairs.of_choices(expert_TK, weight_TK)
    unknown = Pairs(known.token_N, known.expert_N, known.weight_N, known.choice_N)
    expected = unknown.of_tokens(4, 5)
    (from_mask,) = torch.autograd.grad(expected.weight_N.square().sum(), weight_TK, retain_graph=True)
    monkeypatch.setattr(Tensor, "nonzero", refuse)
    own = known.of_tokens(4, 5)
    (from_slice,) = torch.autograd.grad(own.weight_N.square().sum(), weight_TK)
    assert torch.equal(from_slice, from_mask)
    for name in ("token_N", "expert_N", "weight_N", "choice_N"):
        assert torch.equal(getattr(own, name), getattr(expected, name))
