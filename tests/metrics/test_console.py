"""The console: the table at the start, when a plain line is due, the ETA, and messages that stay."""

import io

import pytest
from rich.console import Console

from megamoe.metrics.console import ProgressLine, print_summary
from megamoe.metrics.formats import format_count, format_duration


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain_console() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=False, width=60), file


def terminal() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=100, color_system=None), file


def run_steps(line: ProgressLine, clock: FakeClock, steps: range, seconds: float) -> None:
    for step in steps:
        clock.now += seconds
        line.update({"step": step})


def test_the_line_shows_what_is_known() -> None:
    console, file = plain_console()
    clock = FakeClock()
    line = ProgressLine(400, console=console, clock=clock)
    line.update({"step": 118})
    clock.now += 1.3714  # for two steps: 280 more take 192 s
    metrics = {
        "step": 120,
        "train/lm_loss": 4.2131,
        "val/lm_loss": 4.31,
        "val/code/lm_loss": 9.0,
        "train/lr": 2.9e-4,
        "perf/tokens_per_s": 3412.4,
        "moe/layer_02/imbalance": 1.2,
        "moe/layer_04/imbalance": 1.42,
        "moe/layer_04/dropped": 0.0,
    }
    line.update(metrics)
    line.close()
    assert file.getvalue().splitlines()[-1] == (
        "step 120/400 | loss 4.213 | val 4.310 | lr 2.9e-04 | 3,412 tok/s | imbalance 1.42 | ETA 3m12s"
    )


def test_dropped_pairs_stand_beside_the_imbalance_which_does_not_count_them() -> None:
    console, file = plain_console()
    line = ProgressLine(400, console=console, clock=FakeClock())
    line.update(
        {"step": 1, "moe/layer_02/imbalance": 1.2, "moe/layer_02/dropped": 0.0, "moe/layer_04/dropped": 0.031}
    )
    line.close()
    assert file.getvalue() == "step 1/400 | imbalance 1.20 | dropped 3.1%\n"


def test_a_validation_loss_stands_at_its_step_alone() -> None:
    """It is always printed; the first further set stands for a main one that is not there."""
    console, file = plain_console()
    line = ProgressLine(400, every=100, console=console, clock=FakeClock())
    steps: tuple[dict[str, float], ...] = (
        {},
        {"val/lm_loss": 4.31},
        {},
        {"val/b/lm_loss": 2.0, "val/all/lm_loss": 8.37},
        {},
    )
    for step, metrics in enumerate(steps, start=1):
        line.update({"step": step, **metrics})
    line.close()
    assert [shown.removesuffix(" | ETA 0s") for shown in file.getvalue().splitlines()] == [
        "step 1/400",
        "step 2/400 | val 4.310",
        "step 4/400 | val all 8.370",
        "step 5/400",
    ]


def test_the_live_line_says_at_which_step_it_was_evaluated() -> None:
    console, file = terminal()
    with ProgressLine(400, console=console, clock=FakeClock()) as line:
        line.update({"step": 118, "val/lm_loss": 4.31})
        line.update({"step": 119})
    assert "step 118/400 | val 4.310" in file.getvalue()
    assert "step 119/400 | val 4.310 (step 118)" in file.getvalue()


def test_the_eta_follows_the_recent_speed() -> None:
    clock = FakeClock()
    line = ProgressLine(100, console=plain_console()[0], clock=clock)
    assert line.eta_s() is None
    run_steps(line, clock, range(1, 31), seconds=9.0)
    assert line.eta_s() == pytest.approx(70 * 9.0)
    run_steps(line, clock, range(31, 41), seconds=1.0)
    # The window of 20 steps holds ten of 9 s and ten of 1 s: 5 s on average.
    assert line.eta_s() == pytest.approx(60 * 5.0)
    run_steps(line, clock, range(41, 51), seconds=1.0)
    assert line.eta_s() == pytest.approx(50 * 1.0)


def printed_steps(file: io.StringIO) -> list[int]:
    return [int(line.split()[1].split("/")[0]) for line in file.getvalue().splitlines()]


def test_plain_lines_are_not_closer_than_two_seconds_and_the_last_is_there() -> None:
    console, file = plain_console()
    clock = FakeClock()
    line = ProgressLine(10, console=console, clock=clock)
    run_steps(line, clock, range(1, 11), seconds=0.75)
    line.close()
    assert printed_steps(file) == [1, 4, 7, 10]


def test_plain_lines_come_every_so_many_steps() -> None:
    console, file = plain_console()
    clock = FakeClock()
    line = ProgressLine(10, every=4, console=console, clock=clock)
    run_steps(line, clock, range(1, 9), seconds=30.0)
    line.close()
    line.close()
    assert printed_steps(file) == [1, 5, 8], "the last update is printed though the run ended early"


def test_messages_stay_above_the_live_line() -> None:
    console, file = terminal()
    with ProgressLine(3, console=console) as line:
        line.update({"step": 1})
        print("saved [step 1]")
        line.update({"step": 2})
    shown = file.getvalue()
    assert "saved [step 1]\n" in shown
    assert shown.index("step 1/3") < shown.index("saved") < shown.index("step 2/3")
    assert "\x1b[2K" in shown, "the line is erased and drawn again in place"
    assert shown.rstrip().endswith("\x1b[?25h"), "the cursor is given back"


def test_the_summary_is_plain_without_a_terminal_and_a_table_on_one() -> None:
    rows: dict[str, list[tuple[str, object]]] = {
        "Model": [("parameters", "24,318,976"), ("path", "x" * 80)],
        "MoE": [("experts", 8)],
    }
    console, file = plain_console()
    print_summary(rows, console)
    assert file.getvalue().splitlines() == [
        "Model",
        "  parameters  24,318,976",
        "  path        " + "x" * 80,
        "MoE",
        "  experts     8",
    ]
    console, file = terminal()
    print_summary(rows, console)
    assert "│ Model │ parameters │ 24,318,976" in file.getvalue()


def test_durations_and_counts_are_short() -> None:
    seconds = [0.4, 59.4, 59.6, 192, 3599.6, 7500, 86399, 273600]
    shown = ["0s", "59s", "1m00s", "3m12s", "1h00m", "2h05m", "1d00h", "3d04h"]
    assert [format_duration(value) for value in seconds] == shown
    assert [format_count(value) for value in (812, 34_100, 12_345_678, 1.42e9)] == [
        "812",
        "34.1k",
        "12.3M",
        "1.42B",
    ]
