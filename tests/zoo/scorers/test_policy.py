"""The policy, the two that it is compared with, and when they are brought up to date."""

from typing import Any

import pytest
import torch

from megamoe.moe.part import StepContext
from tests.support.moe.build import HIDDEN, make_hidden, make_layer, make_part, moe_config

TREE: dict[str, Any] = {
    "num_experts": 4,
    "router": {"scorer": "policy", "selector": "sample"},
    "losses": {"grpo": 0.01},
}


def end_step(scorer: Any, step: int) -> None:
    """The optimiser moves the weights to `step` everywhere."""
    with torch.no_grad():
        scorer.weight.fill_(step)
        scorer.after_step(torch.zeros(4, dtype=torch.int64), StepContext(step=step))


def test_scores_of_the_three() -> None:
    scorer, hidden_TH = make_part("scorer", "policy", dims={"init_std": 0.4}), make_hidden(6)
    start_EH = scorer.weight.detach().double()
    with torch.no_grad():
        scorer.weight += 1
        scorer.old_weight += 2
    scores_TE, extras = scorer(hidden_TH.requires_grad_(), StepContext())
    given = [scores_TE, extras["sampling_scores_TE"], extras["reference_scores_TE"]]
    for shift, found_TE in zip((1, 2, 0), given, strict=True):
        plain_TE = hidden_TH.double() @ (start_EH + shift).T
        torch.testing.assert_close(found_TE.double(), plain_TE, rtol=1e-5, atol=1e-5)
    assert [found_TE.requires_grad for found_TE in given] == [True, False, False]
    assert set(scorer.eval()(hidden_TH, StepContext())[1]) == set()


def test_both_copies_start_alike() -> None:
    _, extras = make_part("scorer", "policy")(make_hidden(6), StepContext())
    assert torch.equal(extras["sampling_scores_TE"], extras["reference_scores_TE"])


@pytest.mark.parametrize(
    ("options", "old", "reference"),
    [
        ({}, [1, 2, 3, 4], [0, 0, 0, 0]),
        ({"old_every": 2}, [0, 2, 2, 4], [0, 0, 0, 0]),
        ({"reference_every": 3}, [1, 2, 3, 4], [0, 0, 3, 3]),
    ],
)
def test_copies_are_updated_at_their_intervals(
    options: dict[str, Any], old: list[int], reference: list[int]
) -> None:
    scorer = make_part("scorer", "policy", **options)
    for buffer in (scorer.old_weight, scorer.reference_weight):
        buffer.zero_()
    seen = []
    for step in (1, 2, 3, 4):
        end_step(scorer, step)
        seen.append((scorer.old_weight.unique().tolist(), scorer.reference_weight.unique().tolist()))
    assert seen == [([o], [r]) for o, r in zip(old, reference, strict=True)]


def test_the_copies_survive_a_checkpoint_and_follow_no_gradient() -> None:
    scorer, other = (
        make_part("scorer", "policy", old_every=9),
        make_part("scorer", "policy", dims={"seed": 5}),
    )
    end_step(scorer, 1)
    other.load_state_dict(scorer.state_dict())
    assert torch.equal(other.old_weight, scorer.old_weight) and not torch.equal(
        other.old_weight, other.weight
    )
    assert [name for name, _ in scorer.named_parameters()] == ["weight"]
    assert scorer.weight.shape == (4, HIDDEN)


def test_a_layer_draws_from_pi_old_and_takes_the_likeliest_in_evaluation() -> None:
    layer = make_layer(moe_config(**TREE))
    scorer: Any = layer.router.scorer
    with torch.no_grad():
        scorer.old_weight.zero_()
        scorer.old_weight[3] = scorer.weight[3] * 0 + 50
    hidden_TH = make_hidden(40).abs()
    routing = layer.router(hidden_TH, layer.context)
    assert (routing.pairs.expert_N == 3).all()
    torch.testing.assert_close(routing.pairs.weight_N, routing.scores_TE.softmax(1)[:, 3])
    best_T = (hidden_TH @ scorer.weight.T).argmax(1)
    assert torch.equal(layer.eval().router(hidden_TH, layer.context).pairs.expert_N, best_T)
