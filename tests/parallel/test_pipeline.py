"""The order of a pipeline's passes: PyTorch's own, what is alive, and the idle time on a simulated clock."""

from dataclasses import astuple
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from megamoe.apps.plan.clock import simulate
from megamoe.model.stage import balanced
from megamoe.parallel.pipeline.schedule import Pass, alive, rounds_problem, training_order

SIZES = [(p, m) for p in (2, 3, 4, 8) for m in (1, 2, 3, 4, 6, 8, 12, 16)]


def of_torch(stages: int, chunks: int, micro_batches: int) -> dict[int, list[Pass]]:
    """Return PyTorch's order of each stage."""
    if chunks == 1:
        schedule: Any = schedules.Schedule1F1B.__new__(schedules.Schedule1F1B)
        schedule._num_stages, schedule._n_microbatches = stages, micro_batches
        schedule.rank = 0
        order = schedule._get_pipeline_order()
    else:
        schedule = schedules.ScheduleInterleaved1F1B.__new__(schedules.ScheduleInterleaved1F1B)
        schedule.pp_group_size, schedule.n_local_stages = stages, chunks
        schedule._n_microbatches = micro_batches
        schedule.number_of_rounds = max(1, micro_batches // stages)
        schedule.microbatches_per_round = micro_batches // schedule.number_of_rounds
        schedule._num_stages, schedule.rank = stages * chunks, 0
        order = {stage: schedule._calculate_single_rank_operations(stage) for stage in range(stages)}
    return {stage: _passes(actions, stages) for stage, actions in order.items()}


def _passes(actions: list[Any], stages: int) -> list[Pass]:
    """Return the passes among PyTorch's actions; it counts the last stage's forward passes of 1F1B from 1."""
    kind = schedules._ComputationType
    computed = [action for action in actions if action is not None]
    passes = [
        Pass(each.computation_type == kind.FORWARD, each.microbatch_index, each.stage_index // stages)
        for each in computed
        if each.computation_type in (kind.FORWARD, kind.FULL_BACKWARD)
    ]
    first = min(each.micro_batch for each in passes if each.forward)
    return [Pass(each.forward, each.micro_batch - first * each.forward, each.chunk) for each in passes]


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_order_is_pytorchs(stages: int, chunks: int, micro_batches: int) -> None:
    if chunks == 1 and micro_batches < stages:
        pytest.skip("PyTorch's 1F1B refuses fewer micro batches than stages")
    if rounds_problem(stages, chunks, micro_batches) is not None:
        pytest.skip("no equal rounds")
    expected = of_torch(stages, chunks, micro_batches)
    for stage in range(stages):
        assert training_order(stage, stages, chunks, micro_batches) == expected[stage]


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_at_most_as_many_micro_batches_are_alive_as_stages_follow(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        order = training_order(stage, stages, 1, micro_batches)
        assert alive(order) == min(micro_batches, stages - stage)
        passes = sorted((each.forward, each.micro_batch) for each in order)
        assert passes == list(product((False, True), range(micro_batches)))


@pytest.mark.parametrize(("stages", "micro_batches"), [size for size in SIZES if size[1] >= size[0]])
def test_idle_share_of_equal_stages(stages: int, micro_batches: int) -> None:
    """(p - 1) / (m + p - 1), and interleaved (p - 1) / (v m + p - 1) where m divides into rounds of p."""

    def seconds(stage: int, each: Pass) -> Any:
        return Fraction(1 if each.forward else 2)

    p, m = stages, micro_batches
    assert simulate(p, 1, m, seconds).idle == Fraction(p - 1, m + p - 1)
    for v in (2, 3):
        if m % p == 0:
            assert simulate(p, v, m, seconds).idle == Fraction(p - 1, v * m + p - 1)


def test_the_clock_by_hand() -> None:
    """Two stages, two micro batches, forward 1 s, backward 2 s, a send 0.5 s.

    Stage 0: F0 0-1, F1 1-2, then it waits for B0 of stage 1: F0 1.5-2.5, B0 2.5-4.5, so 5-7; F1 of stage 1
    4.5-5.5, B1 5.5-7.5, so B1 of stage 0 is 8-10.
    """
    found = simulate(2, 1, 2, lambda stage, each: 1.0 if each.forward else 2.0, send=0.5)
    assert found.end[1, Pass(False, 0)] == 4.5
    assert found.end[0, Pass(False, 0)] == 7.0
    assert (found.total, found.busy) == (10.0, [6.0, 6.0])
    assert found.idle == pytest.approx(0.4)


def test_rounds_of_interleaved_stages() -> None:
    assert rounds_problem(4, 2, 3) is None  # fewer than the stages: one round
    assert rounds_problem(4, 1, 9) is None
    problem = rounds_problem(4, 2, 9)
    assert problem is not None and "multiple of 4" in problem
    with pytest.raises(ValueError, match="9 micro batches do not divide into 2 equal rounds over 4 stages"):
        training_order(0, 4, 2, 9)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_every_pass_is_there_once(stages: int, chunks: int) -> None:
    for micro_batches in range(1, 20):
        if rounds_problem(stages, chunks, micro_batches) is None:
            for stage in range(stages):
                order = map(astuple, training_order(stage, stages, chunks, micro_batches))
                assert sorted(order) == [*product((False, True), range(micro_batches), range(chunks))]


@pytest.mark.parametrize(
    ("work", "after", "parts", "expected"),
    [
        ([1, 1, 1, 1], 0, 2, [2, 2]),
        ([1, 1, 1, 1], 2, 2, [3, 1]),  # the output layer is work of two blocks
        ([1, 1, 1, 1], 9, 2, [3, 1]),  # a part has at least one block
        ([5, 1, 1, 1], 0, 2, [1, 3]),
        ([1, 1, 1, 1, 1], 1, 3, [2, 2, 1]),
        ([1, 2], 0, 2, [1, 1]),
    ],
)
def test_balanced_split(work: list[float], after: float, parts: int, expected: list[int]) -> None:
    """The heaviest part is as light as it can be; compared with all splits."""
    found = balanced(work, after, parts)
    assert found == expected
