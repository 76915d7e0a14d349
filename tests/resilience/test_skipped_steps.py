"""The rule for skipped steps, with numbers worked out by hand, and its messages."""

import json
import math

import pytest

from megamoe.config.schema import LossSpikeConfig, TrainConfig
from megamoe.resilience.skipped_steps import Problem, SkipPolicy, name_samples

SPIKE = LossSpikeConfig(sigmas=2.0, window=4)


def rule(spike: LossSpikeConfig = SPIKE, most: int = 3, losses: tuple[float, ...] = ()) -> SkipPolicy:
    """After applied steps of these losses."""
    steps = SkipPolicy(TrainConfig(loss_spike=spike, max_skipped_in_a_row=most))
    for loss in losses:
        steps.update(None, loss)
    return steps


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_without_a_rule(value: float) -> None:
    steps = rule(LossSpikeConfig())
    assert steps.reason_to_skip(1e30, 1e30) is None
    assert steps.reason_to_skip(value, value) == Problem(f"train/lm_loss is {value}")
    assert steps.reason_to_skip(1.0, value) == Problem(f"train/loss is {value}")  # an auxiliary loss


def test_a_spike_is_a_number_of_standard_deviations_above_the_mean() -> None:
    """The losses 2, 4, 4, 6 have mean 4, sum of squared deviations 8, and deviation sqrt(8 / 3)."""
    limit = 4 + 2 * math.sqrt(8 / 3)  # 7.266
    steps = rule(losses=(2, 4, 4, 6))
    assert steps.limit() == pytest.approx(limit, rel=1e-15)
    assert steps.reason_to_skip(7.26, 7.26) is None and steps.reason_to_skip(-99.0, -99.0) is None
    message = (
        "train/lm_loss is 7.2700, above 7.2660, the mean of the last 4 applied steps + 2 standard deviations "
        "(train.loss_spike)"
    )
    assert steps.reason_to_skip(7.27, 7.27) == Problem(message)


def test_the_window_holds_the_last_applied_steps_and_must_be_full() -> None:
    steps = rule(losses=(100, 2, 4))
    assert steps.limit() is None and steps.reason_to_skip(1e9, 1e9) is None
    steps.update(Problem("skipped"), 1e9)
    assert steps.limit() is None
    steps.update(None, 4)
    steps.update(None, 6)  # pushes out 100
    assert steps.limit() == pytest.approx(4 + 2 * math.sqrt(8 / 3))


def test_problems_in_a_row_end_the_run() -> None:
    steps, problem = rule(LossSpikeConfig()), Problem("broken")
    for applied in (False, True, False, False):
        steps.update(None if applied else problem, 1.0)
        assert steps.reason_to_end(problem) is None
    overflow = Problem("the loss scale falls", counts=False)
    steps.update(overflow, 1.0)
    assert steps.in_a_row == 2 and steps.reason_to_end(overflow) is None
    steps.update(problem, 1.0)
    assert steps.reason_to_end(problem) == "3 skipped in a row (train.max_skipped_in_a_row)"


def test_one_means_at_the_first_and_stop_at_once() -> None:
    problem = Problem("broken")
    first = rule(most=1)
    first.update(problem, 1.0)
    assert first.reason_to_end(problem)
    stopping = rule(LossSpikeConfig(sigmas=1.0, window=2, action="stop"), losses=(1, 1))
    spike = stopping.reason_to_skip(1.1, 1.1)
    assert spike is not None and spike.ends
    stopping.update(spike, 1.1)
    assert stopping.reason_to_end(spike) == "train.loss_spike.action is stop"


def test_the_state_comes_back_to_the_last_bit() -> None:
    steps = rule(losses=(9.0, 0.1, 1 / 3, math.pi, 1e-17))
    steps.update(Problem("broken"), math.nan)
    state = json.loads(json.dumps(steps.state(), allow_nan=False))
    again = rule()
    again.restore(state)
    assert (again.state(), again.limit(), again.in_a_row) == (steps.state(), steps.limit(), 1)
    shorter = rule(LossSpikeConfig(sigmas=2.0, window=2))
    shorter.restore(state)
    assert shorter.state()["losses"] == [math.pi, 1e-17]
    earlier = rule()
    earlier.restore({})  # a checkpoint from before the rule
    assert earlier.state() == {"in_a_row": 0, "losses": []}


def test_samples_are_named_by_rank_and_micro_batch() -> None:
    assert name_samples({0: {}, 1: {}}) == ""
    assert name_samples({0: {}, 2: {1: [7], 0: [4, 5]}}) == (
        "; not finite: 4, 5 (rank 2, micro batch 1); 7 (rank 2, micro batch 2)"
    )
    many = name_samples({rank: {0: [rank]} for rank in range(11)})
    assert many.endswith("; 7 (rank 7, micro batch 1) and those of 3 more micro batches")
