"""docs/metrics.md names every metric that a run writes, and none that no run writes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megamoe.train.loop import train
from tests.support.tiny import restored_process, tiny

PAGE = (Path(__file__).parents[1] / "docs/metrics.md").read_text()
RUN = (
    "model.multi_token_prediction.depth=1",
    "moe.router={scorer: cosine, selector: {name: top_k, k: 2}}",
    "moe.router.score_function={name: sigmoid, bias_update: 0.01}",
    "moe.losses={switch_balance: 0.1}",
    "data.validation={code: [unused]}",
    "data.split=[0.8, 0.1, 0.1]",
    "train.steps=2",
    "log.timers=true",
    "log.peak_tflops=1.5",
    "log.gradient_shares_every=2",
)
# Only of fp16, of a skipped step, of several ranks, and of labels.
ELSEWHERE = {
    "train/loss_scale",
    "train/skipped_steps",
    "val/<set>/accuracy",
    "val/<set>/squared_error",
    "perf/own_s",
    "perf/slowest_own_s",
    "perf/slowest_rank",
    "perf/stragglers",
    "rank_load",
    "rank_imbalance",
    "rank_overload",
}


def documented() -> dict[str, str]:
    """Unit by name, of the page's tables."""
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| [^|]+ \|$", PAGE, flags=re.MULTILINE)
    return {name: unit.strip() for name, unit in rows}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    output = tmp_path_factory.mktemp("run")
    with restored_process():
        train(tiny(f"output={output}", *RUN))
    return [json.loads(line) for line in (output / "run/metrics.jsonl").read_text().splitlines()]


def written(rows: list[dict[str, Any]]) -> set[str]:
    """The names as the page writes them: without the layer, and with <loss>, <set> and <k>."""
    found = set()
    for key in {key for row in rows for key in row}:
        name = re.sub(r"^moe/(layer_\d+/)?", "", key)
        name = re.sub(r"ahead_\d+", "ahead_<k>", name.replace("val/code/", "val/<set>/"))
        found.add(name.replace("switch_balance", "<loss>"))
    return found


def test_every_metric_of_a_run_has_its_unit_and_formula(rows: list[dict[str, Any]]) -> None:
    assert written(rows) == documented().keys() - ELSEWHERE
    assert all(documented().values())


def test_the_formulas_of_speed_hold(rows: list[dict[str, Any]]) -> None:
    row = rows[-1]
    assert row["perf/tokens_per_s"] * row["perf/step_s"] == pytest.approx(row["train/batch_size"] * 8)
    assert row["perf/mfu"] == pytest.approx(row["perf/tflops_per_rank"] / 1.5)
    stages = [row[f"perf/{stage}_s"] for stage in ("route", "dispatch", "experts", "combine")]
    assert all(seconds > 0 for seconds in stages) and sum(stages) < row["perf/step_s"]


def test_shares_of_gradients_are_measured_at_intervals(rows: list[dict[str, Any]]) -> None:
    measured = ["moe/layer_01/gradient_share/switch_balance" in row for row in rows]
    assert measured == [False, True]
