"""Every metric that a run writes is declared in metrics/names.py, whose tables docs/run/metrics.md has."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from megamoe.metrics import names
from megamoe.metrics.sinks.summaries import summary_of
from megamoe.registry import RESERVED_LOSS_NAMES
from megamoe.train.loop import train
from tests.metrics.test_summaries import keys, step_of
from tests.support.tiny import restored_process, tiny

COMMON = ("data.validation={code: [unused]}", "data.split=[0.8, 0.1, 0.1]", "train.steps=2")
EVERYTHING = (
    *("model.multi_token_prediction.depth=1", "log.timers=true", "log.peak_tflops=1.5"),
    "moe.router={scorer: cosine, residual: gating, selector: {name: top_k, k: 2}}",
    "moe.router.score_function={name: sigmoid, bias_update: 0.01}",
    "moe.losses={switch_balance: 0.1}",
)
LOSSES = ("switch_balance", "z_loss", "importance")
RUNS = {
    "everything": EVERYTHING,
    "dense": ("moe.layers=none",),
    "several losses": (f"moe.losses={{{', '.join(f'{name}: 0.01' for name in LOSSES)}}}",),
    "threshold": ("moe.router={selector: {name: threshold, threshold: 0.2}}", "moe.losses={z_loss: 0.01}"),
    "noise": ("moe.router={scorer: noisy, selector: {name: top_k, k: 2}}", "moe.losses={load: 0.01}"),
}
WORDS = {  # that stand for the <names> of a pattern
    "loss": {*LOSSES, "load"},
    "set": {"code"},
    "k": {"1"},
    "quantile": {"min", "p25", "median", "p75", "max"},
    "n": set("1234"),
    "block": {"01", "02", "03"},
}
# Only of fp16, of a skipped step, of several ranks, of labels, and of parts of one's own.
ELSEWHERE = {
    *(names.LOSS_SCALE, names.SKIPPED_STEPS, "<part>/<number>"),
    *(names.OWN_S, names.SLOWEST_OWN_S, names.SLOWEST_RANK, names.STRAGGLERS),
    *(names.RANK_LOAD, names.RANK_IMBALANCE, names.RANK_OVERLOAD),
    *(f"{of_set}/accuracy" for of_set in ("val", "val/<set>", "test")),
    *(f"{of_set}/squared_error" for of_set in ("val", "val/<set>", "test")),
}
PLANTED = """
    planted train/planted train/planted/weighted perf/planted_s val/planted val/x/lm_loss
    moe/planted moe/layer_01/planted moe/layer_01/scorer/planted moe/layer_01/loss/planted
    train/lm_loss/ahead_1 load/planted layers/planted/max layers/dead/planted
"""


def declared(key: str) -> str | None:
    """The key or pattern under which a key is declared, if the words in it are those of these runs."""
    metric, of_layer = names.metric_of(key), names.IN_LAYER.fullmatch(key)
    if metric is None:
        return None
    found = names.keys_like(metric.key).fullmatch(of_layer[2] if of_layer else key.removeprefix("moe/"))
    assert found is not None
    for kind, word in found.groupdict().items():
        if not (declared(names.of_layer(1)[word]) if kind == "name" else word in WORDS.get(kind, ())):
            return None
    return metric.key


def undeclared(written: Iterable[str]) -> list[str]:
    return [key for key in written if declared(key) is None]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The records of each of RUNS."""
    found = {}
    for name, overrides in RUNS.items():
        output = tmp_path_factory.mktemp("run")
        with restored_process():
            train(tiny(f"output={output}", *COMMON, *overrides))
        found[name] = [json.loads(line) for line in (output / "run/metrics.jsonl").read_text().splitlines()]
    return found


@pytest.fixture(scope="module")
def shown(rows: dict[str, list[dict[str, Any]]]) -> set[str]:
    """The keys of all that is shown of these records, with a picture of the last of each run."""
    found: set[str] = set()
    for run in rows.values():
        for row in run:
            found.update(keys(summary_of(row)))
    return found


def test_every_key_of_a_run_is_declared(rows: dict[str, list[dict[str, Any]]], shown: set[str]) -> None:
    for run in rows.values():
        assert undeclared(key for row in run for key in row) == []
    assert undeclared(shown) == []
    assert undeclared(keys(summary_of(step_of(3, 8)))) == []


@pytest.mark.parametrize("key", PLANTED.split())
def test_a_planted_key_is_seen(key: str) -> None:
    assert undeclared(["step", key]) == [key]


def test_every_declared_metric_is_written(rows: dict[str, list[dict[str, Any]]], shown: set[str]) -> None:
    logged = [row for run in rows.values() for row in run]
    found = {declared(key) for key in shown.union(*logged)}
    assert {metric.key for table in names.TABLES for metric in table} == found | ELSEWHERE
    assert not found & ELSEWHERE


def test_a_key_is_declared_once_and_no_loss_may_take_its_name() -> None:
    found = [metric.key for table in (names.TRAINING, names.SPEED, names.SHOWN) for metric in table]
    assert len(set(found)) == len(found)
    of_training = {key.removeprefix("train/") for key in found if key.startswith("train/") and "<" not in key}
    assert of_training == set(RESERVED_LOSS_NAMES)


def test_the_formulas_of_speed_hold(rows: dict[str, list[dict[str, Any]]]) -> None:
    row = rows["everything"][-1]
    assert row["perf/tokens_per_s"] * row["perf/step_s"] == pytest.approx(row["train/batch_size"] * 8)
    of_step = row["perf/tflops_per_rank"] * row["perf/step_s"] * 1e12
    assert row["perf/gflops_per_token"] * 1e9 * row["train/batch_size"] * 8 == pytest.approx(of_step)
    assert row["perf/mfu"] == pytest.approx(row["perf/tflops_per_rank"] / 1.5)
    stages = [row[f"perf/{stage}_s"] for stage in ("route", "dispatch", "experts", "combine")]
    assert all(seconds > 0 for seconds in stages) and sum(stages) < row["perf/step_s"]
