"""Replayed choices: what every selector makes of its own, bit for bit; what it makes of others."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.apps.routing_record.record import Rows
from megamoe.moe.layer import MoELayer
from megamoe.moe.part import Selector, StepContext
from megamoe.moe.routing import Pairs, Scored, count
from tests.moe.test_registered import every_part, layers_with, step
from tests.support.moe.build import make_layer, make_part, make_scored, moe_config


class Recording:
    """Keeps a layer's choices as they are recorded."""

    def select(self, selector: Selector, scored: Scored, context: StepContext) -> Pairs:
        pairs: Pairs = selector(scored, context)
        counts_T = count(pairs.token_N, scored.num_tokens)
        self.rows = Rows.of(torch.arange(scored.num_tokens), counts_T, pairs.expert_N)
        return pairs


class Replaying:
    """Replaces a layer's choices."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def select(self, selector: Selector, scored: Scored, context: StepContext) -> Pairs:
        place_T = self.rows.find(torch.arange(scored.num_tokens))
        assert place_T is not None
        return selector.replayed(scored, *self.rows.choices(place_T))


def compared(recorded: MoELayer, replayed: MoELayer) -> None:
    """Train a step of both, the second with the choices of the first."""
    recorded.router.choices = recording = Recording()
    expected = step(recorded)
    replayed.router.choices = Replaying(recording.rows)
    if not replayed.router.selector.replays(replayed.router.selector.config):
        with pytest.raises(NotImplementedError):
            step(replayed)
        return
    found = step(replayed)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@every_part
def test_own_choices_give_the_same_bits(kind: str, name: str) -> None:
    for one, other in zip(layers_with(kind, name), layers_with(kind, name), strict=True):
        compared(one, other)


def test_it_holds_for_the_parts_of_a_plugin(own_parts: list[tuple[str, str]]) -> None:
    for kind, name in own_parts:
        test_own_choices_give_the_same_bits(kind, name)


@pytest.mark.parametrize("weights", ["raw", "renormalised", "kept_softmax", "one"])
@pytest.mark.parametrize("mask", [None, {"name": "entropy_prune"}])
def test_every_weight_of_top_k(weights: str, mask: dict[str, Any] | None) -> None:
    selector = {"name": "top_k", "k": 3, "weights": weights}
    tree = {"selector": selector, "masks": [mask] if mask else []}
    config = moe_config(num_experts=4, router=tree)
    compared(make_layer(config), make_layer(config))


def choices(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    padded = [row + [0] * (width - len(row)) for row in rows]
    return torch.tensor(padded), torch.tensor([len(row) for row in rows])


def test_other_choices_are_weighted_by_the_present_probabilities() -> None:
    probs_TE = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]])
    scored = make_scored(probs_TE.log(), probs_TE)
    given = choices([[0, 1], [3], []])
    for name, options, expected in (
        ("top_k", {"k": 2, "weights": "renormalised"}, [1 / 3, 2 / 3, 1.0]),
        ("top_k", {"k": 3, "weights": "kept_softmax"}, [1 / 3, 2 / 3, 1.0]),
        ("top_k", {"k": 1, "weights": "raw"}, [0.1, 0.2, 0.1]),
        ("threshold", {}, [0.1, 0.2, 0.1]),
        ("entropy_aware", {"weights": "renormalised"}, [1 / 3, 2 / 3, 1.0]),
        ("sample", {"k": 2, "weights": "renormalised"}, [1 / 3, 2 / 3, 1.0]),
        ("sinkhorn", {}, [0.1, 0.2, 0.1]),
        ("balanced", {}, [0.1, 0.2, 0.1]),
        ("table", {}, [1.0, 1.0, 1.0]),
        ("expert_choice", {"allow_non_causal": True}, [0.1, 0.2, 0.1]),
    ):
        pairs = make_part("selector", name, **options).replayed(scored, *given)
        assert pairs.token_N.tolist() == [0, 0, 1], name
        assert pairs.expert_N.tolist() == [0, 1, 3], name
        assert pairs.choice_N.tolist() == [0, 1, 0], name
        assert pairs.weight_N.tolist() == pytest.approx(expected), name
