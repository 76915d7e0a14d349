"""Learning rates at points worked by hand; the batch ramp-up against a plain simulation."""

import math

import pytest

from megamoe.config.schema import OptimizerConfig, RampupConfig, TrainConfig
from megamoe.optim.schedule import BatchSchedule, learning_rate, warmup_steps

# With lr 1, min_lr 0.1, a warm-up of 10 steps and the end at step 110, step 35 is a quarter of the fall.
POINTS = {
    "cosine": {35: 1 - 0.9 * (1 - math.sqrt(0.5)) / 2, 60: 0.55, 110: 0.1, 500: 0.1},
    "linear": {35: 0.775, 60: 0.55, 85: 0.325, 110: 0.1, 500: 0.1},
    "inverse_sqrt": {40: 0.5, 90: 1 / 3, 250: 0.2, 1000: 0.1, 4000: 0.1},
    "wsd": {50: 1.0, 90: 1.0, 95: 0.775, 100: 0.55, 110: 0.1, 500: 0.1},
    "constant": {60: 1.0, 110: 1.0, 500: 1.0},
}


def optimizer(schedule: str, **options: object) -> OptimizerConfig:
    defaults = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, "decay_steps": 110, "wsd_decay_steps": 20}
    return OptimizerConfig(schedule=schedule, **(defaults | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", POINTS)
def test_learning_rate_at_hand_computed_steps(schedule: str) -> None:
    points = {1: 0.1, 5: 0.5, 10: 1.0} | POINTS[schedule]
    found = {step: learning_rate(step, optimizer(schedule), 1000) for step in points}
    assert found == pytest.approx(points, rel=1e-12)


@pytest.mark.parametrize("schedule", POINTS)
def test_it_rises_to_the_peak_without_a_jump_and_then_only_falls(schedule: str) -> None:
    rates = [learning_rate(step, optimizer(schedule), 1000) for step in range(1, 200)]
    assert max(rates) == rates[9] == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[9] - rates[10] < 0.05  # the inverse root, the steepest there, falls by 1 - sqrt(10 / 11)


def test_defaults_end_at_the_last_step_and_wsd_falls_over_a_tenth() -> None:
    assert learning_rate(1, optimizer("linear", warmup_steps=0, decay_steps=None), 100) == pytest.approx(
        0.991
    )
    assert learning_rate(100, optimizer("linear", decay_steps=None), 100) == 0.1
    wsd = optimizer("wsd", decay_steps=None, wsd_decay_steps=None)
    assert [learning_rate(step, wsd, 200) for step in (180, 190, 200)] == pytest.approx([1.0, 0.55, 0.1])


def test_wsd_may_end_in_a_cosine() -> None:
    """As Kimi K2's rate: constant, then half a period over the last steps."""
    config = optimizer("wsd", wsd_decay="cosine")
    found = [learning_rate(step, config, 1000) for step in (90, 95, 100, 110, 500)]
    assert found == pytest.approx([1.0, 1 - 0.9 * (1 - math.sqrt(0.5)) / 2, 0.55, 0.1, 0.1])


def test_warmup_may_take_the_whole_schedule() -> None:
    config = optimizer("cosine", warmup_steps=110)
    assert [learning_rate(step, config, 110) for step in (55, 110, 111)] == [0.5, 1.0, 0.1]


@pytest.mark.parametrize(
    ("share", "steps", "expected"),
    [(0.1, 100, 10), (0.1, 30, 3), (0.1, 31, 4), (0.06, 125_000, 7500), (0.0, 50, 0), (0.29, 100, 29)],
)
def test_warmup_as_a_share_is_rounded_up(share: float, steps: int, expected: int) -> None:
    config = OptimizerConfig(lr=1.0, schedule="linear", warmup_share=share)
    assert warmup_steps(config, steps) == expected
    explicit = OptimizerConfig(lr=1.0, schedule="linear", warmup_steps=expected)
    for step in (1, max(expected, 1), expected + 1, steps):
        assert learning_rate(step, config, steps) == learning_rate(step, explicit, steps)


def test_constant_batch() -> None:
    schedule = BatchSchedule.from_config(TrainConfig(micro_batch_size=2, global_batch_size=24), 3)
    assert (schedule.size_at(0), schedule.size_at(10**9)) == (24, 24)
    assert schedule.accumulation_at(0) == 4  # 24 = 2 per micro batch x 3 ranks x 4
    assert schedule.total_samples(7) == 168
    default = BatchSchedule.from_config(TrainConfig(micro_batch_size=2), 3)
    assert (default.size_at(0), default.accumulation_at(0)) == (6, 1)


def simulated_sizes(start: int, increment: int, samples: int, final: int, steps: int) -> list[int]:
    """Megatron-LM's --rampup-batch-size: each increment lasts samples / number of increments."""
    samples_per_increment = samples / ((final - start) / increment)
    sizes: list[int] = []
    for _ in range(steps):
        consumed = sum(sizes)
        grown = start + int(consumed / samples_per_increment) * increment
        sizes.append(final if consumed > samples else grown)
    return sizes


@pytest.mark.parametrize(
    ("start", "increment", "samples", "final"),
    [(4, 4, 48, 16), (8, 8, 1000, 32), (2, 2, 30, 6), (4, 4, 4, 64)],
)
def test_rampup_is_megatrons(start: int, increment: int, samples: int, final: int) -> None:
    ramp = RampupConfig(start=start, increment=increment, samples=samples)
    train = TrainConfig(micro_batch_size=2, global_batch_size=final, batch_rampup=ramp)
    schedule = BatchSchedule.from_config(train, 1)
    expected = simulated_sizes(start, increment, samples, final, steps=120)
    sizes: list[int] = []
    for _ in expected:
        sizes.append(schedule.size_at(sum(sizes)))
    assert sizes == expected
    assert sizes[0] == start and sizes[-1] == final
    assert [schedule.total_samples(steps) for steps in range(121)] == [sum(sizes[:n]) for n in range(121)]


@pytest.mark.parametrize("ramp", [None, RampupConfig(start=4, increment=4, samples=24)])
def test_whole_steps_are_the_most_that_fit(ramp: RampupConfig | None) -> None:
    schedule = BatchSchedule.from_config(TrainConfig(global_batch_size=12, batch_rampup=ramp), 2)
    for samples in range(100):
        steps = schedule.whole_steps(samples)
        assert schedule.total_samples(steps) <= samples < schedule.total_samples(steps + 1)


def test_rampup_by_hand() -> None:
    ramp = RampupConfig(start=4, increment=4, samples=24)  # 8, 12: two increments of 12 samples each
    schedule = BatchSchedule.from_config(TrainConfig(global_batch_size=12, batch_rampup=ramp), 2)
    assert [schedule.size_at(consumed) for consumed in (0, 11, 12, 23, 24, 100)] == [4, 4, 8, 8, 12, 12]
    assert schedule.accumulation_at(12) == 4
    assert schedule.total_samples(6) == 4 + 4 + 4 + 8 + 8 + 12


@pytest.mark.parametrize(("start", "increment", "samples"), [(2, 2, 8), (4, 4, 1000), (2, 6, 37), (20, 2, 5)])
def test_the_samples_of_many_steps_are_those_of_each(start: int, increment: int, samples: int) -> None:
    schedule = BatchSchedule(final=20, unit=2, start=start, increment=increment, ramp_samples=samples)
    consumed = 0
    for step in range(150):
        assert schedule.total_samples(step) == consumed
        consumed += schedule.size_at(consumed)


def test_the_samples_of_a_billion_steps_are_computed_at_once() -> None:
    schedule = BatchSchedule(final=20, unit=2, start=2, increment=2, ramp_samples=10**12)
    assert schedule.total_samples(10**9) == schedule.total_samples(10**9 - 1) + 2
