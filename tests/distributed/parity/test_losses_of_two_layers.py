"""A loss that reads the scores of the MoE layer before trains as on one rank.

Between chunks of a pipeline, with a sequence cut over tensor-parallel ranks, recomputed, with and without
gradient to the layer before.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megamoe.config import parse_config
from megamoe.config.groups import scores_before_losses
from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.registry import get_part, register
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import Place, assert_as_alone, train_each

STEPS = 2
RUN: dict[str, Any] = {
    "model__num_layers": 4,
    "moe__layers": {"at": [1, 4]},  # two chunks hand the scores on
    "train__global_batch_size": 4,
}
PLACES = [
    Place(2, pipeline=2, chunks=2, recompute="full"),
    Place(2, tensor=2, expert_tensor=2, sequence=True, zero=1, recompute="full"),
]


class Difference(Part):
    """Mean squared difference of the probabilities of two layers. Scope: tokens."""

    reads_before = True

    @dataclass
    class Config:
        """weight: factor in the total loss. fixed: no gradient to the layer before."""

        weight: float = 1.0
        fixed: bool = False

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Scalar fp32."""
        if routing.before_TE is None:
            return routing.scores_TE.sum() * 0
        before_TE = routing.before_TE.detach() if self.config.fixed else routing.before_TE
        return (routing.scores_TE.softmax(1) - before_TE.softmax(1)).square().sum(1).mean()


def trained(place: dict[str, Any]) -> list[dict[str, Any]]:
    """Job: see `train_each`; both forms of the loss, and none."""
    register("loss", "difference")(Difference)
    losses: list[dict[str, Any]] = [{"difference": {"weight": 30.0, "fixed": it}} for it in (False, True)]
    return train_each([{**RUN, **place, "moe__losses": each} for each in (*losses, {})], STEPS)


@pytest.fixture(scope="module")
def alone(pool: Pool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pool.run(trained, {}, ranks=1)[0]
    return found


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_layout_trains_as_one_rank_does(
    pool: Pool, alone: list[dict[str, Any]], tmp_path: Path, place: Place
) -> None:
    found = pool.run(trained, place.changes(tmp_path), ranks=place.ranks)
    for number, expected in enumerate(alone):
        assert_as_alone([rank[number] for rank in found], expected, f"{place}, run {number}")


def test_it_makes_a_difference(alone: list[dict[str, Any]]) -> None:
    """In the loss, and in the gradient if it reaches the layer before."""
    whole, fixed, none = alone
    assert whole["loss"][0] == fixed["loss"][0] > none["loss"][0] + 0.1
    assert len({each["grad_norm"][0] for each in alone}) == 3


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([], {2: 1, 3: 2, 4: 3}),
        ([{"layers": [2, 3], "losses": {}}], {4: 3}),
        ([{"layers": [2], "num_experts": 16}], {3: 1, 4: 3}),
    ],
    ids=["each", "layers without the loss", "other experts"],
)
def test_which_layer_is_before(
    monkeypatch: pytest.MonkeyPatch, groups: list[dict[str, Any]], expected: dict[int, int]
) -> None:
    monkeypatch.setattr(get_part("loss", "z_loss"), "reads_before", True)
    tree: dict[str, Any] = {
        "model": {"num_layers": 4},
        "moe": {"layers": {"every": 1}, "num_experts": 4, "losses": {"z_loss": 0.1}, "groups": groups},
    }
    assert scores_before_losses(parse_config(tree)) == expected
    monkeypatch.undo()
    assert scores_before_losses(parse_config(tree)) == {}
