"""The bias of DeepSeek-V3: how it moves, what it shifts, and that it touches nothing else."""

from typing import Any

import pytest
import torch

from megamoe.moe.layer import MoELayer
from megamoe.moe.part import StepContext
from tests.support.moe.build import make_hidden, make_layer, make_part, moe_config, observed

both_score_functions = pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])


def layer_with_bias(score_function: str, update: float) -> MoELayer:
    return make_layer(
        moe_config(num_experts=4, router={"score_function": {"name": score_function, "bias_update": update}})
    )


@both_score_functions
def test_the_bias_moves_against_the_load(score_function: str) -> None:
    part = make_part("score_function", score_function, bias_update=0.25)
    assert part.bias_E.tolist() == [0, 0, 0, 0] and part.bias_E.dtype == torch.float32
    part.after_step(torch.tensor([4, 1, 2, 1]), StepContext())  # the mean is 2
    assert part.bias_E.tolist() == [-0.25, 0.25, 0, 0.25]
    part.after_step(torch.tensor([4, 3, 0, 0]), StepContext())  # 1.75
    assert part.bias_E.tolist() == [-0.5, 0, 0.25, 0.5]
    part.after_step(torch.tensor([0, 0, 0, 0]), StepContext())
    assert part.bias_E.tolist() == [-0.5, 0, 0.25, 0.5]


def test_the_layer_tells_the_score_function_which_experts_a_step_closed() -> None:
    context = StepContext(seed=3, step=1)
    config = moe_config(
        num_experts=8,
        router={
            "masks": [{"name": "expert_dropout", "cluster_size": 4}],
            "score_function": {"name": "sigmoid", "bias_update": 0.25},
            "selector": {"k": 2},
        },
    )
    layer = make_layer(config, context)
    layer(make_hidden(40))
    wanted_E = observed(layer).wanted_E
    layer.after_step(wanted_E)
    bias_E = layer.router.score_function.bias_E
    mask: Any = layer.router.masks[0]
    closed_E = mask.closed_E(context)
    assert bias_E is not None and closed_E.sum() == 4
    mean = 40 * 2 / 4
    expected_E = torch.where(closed_E, 0.0, -0.25 * (wanted_E - mean).sign())
    assert torch.equal(bias_E, expected_E) and bias_E.any()


def test_it_stays_after_its_last_step() -> None:
    part = make_part("score_function", "sigmoid", bias_update=0.25, bias_until=7)
    for step in (7, 8, 9):
        part.after_step(torch.tensor([4, 1, 2, 1]), StepContext(step=step))
    assert part.bias_E.tolist() == [-0.25, 0.25, 0, 0.25]


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ([3, 3, 4], [0.25, 0.25, -0.25]),  # the mean is 10/3
        ([2**40, 2**40 + 1, 2**40, 2**40 - 1], [0, -0.25, 0, 0.25]),  # fp32 would not tell these apart
        ([-1, 5, 3, -1], [0, -0.25, 0.25, 0]),  # two were closed: they stay, and are not in the mean
    ],
)
def test_the_mean_is_exact_and_that_of_the_open_experts(load: list[int], expected: list[float]) -> None:
    part = make_part("score_function", "sigmoid", len(load), bias_update=0.25)
    part.after_step(torch.tensor(load), StepContext())
    assert part.bias_E.tolist() == expected


@both_score_functions
def test_it_shifts_the_choice_and_not_p(score_function: str) -> None:
    layer, plain = layer_with_bias(score_function, 0.1), layer_with_bias(score_function, 0.0)
    bias_E = layer.router.score_function.bias_E
    assert bias_E is not None
    bias_E.copy_(torch.tensor([0.0, 0.3, -0.2, 0.1]))
    routing = layer.router(make_hidden(40), StepContext())
    expected = plain.router(make_hidden(40), StepContext())
    assert torch.equal(routing.probs_TE, expected.probs_TE)
    assert torch.equal(routing.affinities_TE, expected.affinities_TE)
    chosen_TK = (expected.probs_TE + bias_E).topk(2).indices
    assert routing.pairs.expert_N.tolist() == chosen_TK.flatten().tolist() != expected.pairs.expert_N.tolist()
    weight_TK = expected.probs_TE.gather(1, chosen_TK)
    torch.testing.assert_close(routing.pairs.weight_N.view(-1, 2), weight_TK / weight_TK.sum(1, keepdim=True))


@both_score_functions
def test_without_the_option_there_is_none(score_function: str) -> None:
    part = make_part("score_function", score_function)
    assert part.bias_E is None and not part.state_dict()
    part.after_step(torch.tensor([4, 0, 0, 0]), StepContext())
