"""What W&B's own client keeps of offline launches, for `wandb sync`, is what metrics.jsonl has."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megamoe.apps.report.record import read_metrics
from megamoe.config.schema import LogConfig, WandbConfig
from megamoe.metrics.recorder import Recorder
from megamoe.metrics.sinks.summaries import summary_of
from megamoe.metrics.sinks.wandb_sink import _for_wandb
from megamoe.train.loop import train
from tests.metrics.test_summaries import step_of
from tests.support.tiny import restored_process, tiny

wandb = pytest.importorskip("wandb")
pytestmark = [pytest.mark.full, pytest.mark.usefixtures("nobody_is_logged_in")]

TOLD = {"seed": 7, "layout": "ranks 1", "study": "capacity"}
BLOCK, HEADER = 2**15, struct.Struct("<IHB")  # of LevelDB's logs: checksum, length, kind of a part
LAST_PARTS = (1, 4)


def records_of(path: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file: 7 bytes, and the parts of the records in blocks."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, record = path.read_bytes(), HEADER.size, b""
    while place < len(content):
        left = BLOCK - place % BLOCK
        if left < HEADER.size:
            place += left
            continue
        _, length, kind = HEADER.unpack_from(content, place)
        place += HEADER.size + length
        record += content[place - length : place]
        if kind in LAST_PARTS:
            yield Record.FromString(record)
            record = b""


def check_launches(folder: Path, name: str) -> dict[str, Any]:
    """Compare the last row of every step with metrics.jsonl, key by key; return the configuration."""
    wandb.teardown()  # its process has written all
    records = [list(records_of(path)) for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]
    assert len(records) == 2
    runs = [next(each.run for each in launch if each.HasField("run")) for launch in records]
    for run in runs:
        assert (run.run_id, run.display_name, run.project) == (runs[0].run_id, name, "p")
        assert (run.run_group, list(run.tags)) == ("capacity", ["t"])
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in each.history.item}
        for launch in records
        for each in launch
        if each.HasField("history")
    ]
    counters = [row["_step"] for row in rows]
    assert counters == sorted(set(counters)), "W&B's counter grows: it drops what goes back"
    last = {row["step"]: row for row in rows}
    logged = read_metrics(folder / "metrics.jsonl")
    assert list(last) == [record["step"] for record in logged]
    for record in logged:
        expected = _for_wandb(summary_of(record))
        for key in [key for key, value in expected.items() if isinstance(value, wandb.Histogram)]:
            histogram = expected.pop(key)
            parts = {"_type": "histogram", "values": histogram.histogram, "bins": histogram.bins}
            expected |= {f"{key}/{name}": value for name, value in parts.items()}
        shown = {key: value for key, value in last[record["step"]].items() if not key.startswith("_")}
        assert shown.keys() == expected.keys()
        for key, value in expected.items():
            assert shown[key] == value or str(shown[key]).lower() == str(value) == "nan", key
    return {item.key: json.loads(item.value_json) for item in runs[-1].config.update if item.key != "_wandb"}


def test_launches_of_a_recorder(tmp_path: Path) -> None:
    """The second one repeats a step, and one loss is no number."""
    options = LogConfig(wandb=WandbConfig(enabled=True, project="p", group="capacity", tags=["t"]))
    for resumed_step, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        recorder = Recorder.open(tmp_path, options, "named", TOLD, resumed_step)
        for step in steps:
            loss = float("nan") if (resumed_step, step) == (None, 2) else 3.0 / step
            recorder.log({**step_of(2, 4, step), "train/lm_loss": loss, "moe/layer_01/load": [step, 3, 0, 1]})
        recorder.close()
    assert check_launches(tmp_path, "named") == TOLD


def test_a_training_and_its_resumption(tmp_path: Path) -> None:
    sink = "log.wandb={enabled: true, project: p, group: capacity, tags: [t]}"
    for more in (("train.exit_after_steps=2", "checkpoint.every=1"), ("checkpoint.resume=auto", "seed=1234")):
        with restored_process():
            train(tiny(f"output={tmp_path}", "name=named", sink, "log.every=1", *more))
    config = check_launches(tmp_path / "named", "named")
    assert config["layout"] == "ranks 1, tensor 1, expert 1, expert tensor 1, ZeRO 0"
    assert (config["study"], config["seed"], config["moe"]["num_experts"]) == ("capacity", 1234, 4)
