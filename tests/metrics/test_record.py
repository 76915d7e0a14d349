"""The record: what is written, what a crash leaves, what a resumed run adds, what is read back."""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megamoe.apps.report.record import read_metrics
from megamoe.config.schema import LogConfig
from megamoe.errors import UserError
from megamoe.metrics import reader
from megamoe.metrics.recorder import Recorder, check_record


def record(folder: Path, rows: list[dict[str, Any]], resumed_step: int | None = None) -> Path:
    recorder = Recorder.open(folder, LogConfig(), "run", {}, resumed_step)
    for row in rows:
        recorder.log(row)
    recorder.close()
    return folder / "metrics.jsonl"


def test_each_line_is_on_disk_before_the_recorder_closes(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path / "new" / "run", LogConfig(), "run", {}, None)
    recorder.log({"step": 1, "train/lm_loss": 2.5, "moe/layer_02/load": np.array([3, 1])})
    line = (tmp_path / "new" / "run" / "metrics.jsonl").read_text()
    assert line == '{"step": 1, "train/lm_loss": 2.5, "moe/layer_02/load": [3, 1]}\n'
    recorder.close()
    recorder.close()


def test_non_finite_values_are_valid_json_and_come_back(tmp_path: Path) -> None:
    path = record(
        tmp_path, [{"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32("nan")}]
    )

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(path.read_text(), parse_constant=refuse)["b"] == "Infinity"
    (row,) = read_metrics(path)
    assert math.isnan(row["a"]) and row["b"] == math.inf and row["c"] == -math.inf and math.isnan(row["d"])


def test_a_run_that_begins_anew_drops_the_old_record(tmp_path: Path) -> None:
    record(tmp_path, [{"step": 1}, {"step": 2}])
    assert record(tmp_path, [{"step": 1, "x": 5}]).read_text() == '{"step": 1, "x": 5}\n'


def test_the_last_record_of_a_repeated_step_counts(tmp_path: Path) -> None:
    path = record(tmp_path, [{"step": 2, "x": 20}, {"step": 1, "x": 10}, {"step": 3, "x": 30}])
    record(tmp_path, [{"step": 2, "x": 21}], resumed_step=3)
    assert read_metrics(path) == [{"step": 1, "x": 10}, {"step": 2, "x": 21}, {"step": 3, "x": 30}]


def test_reading_leaves_out_a_broken_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "tr')
    assert read_metrics(path) == [{"step": 1}]


WHOLE = b'{"step": 1}\n{"step": 2}\n'
KEPT = b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'
LEFT = {  # by a launch, or by a power failure
    "later steps": WHOLE + b'{"step": 3}\n{"step": 4}\n',
    "half a line": WHOLE + b'{"step": 3, "train/lm_lo',
    "a whole line without newline": WHOLE[:-1],
    "NULs at the end": WHOLE + b"\0" * 5000,
    "NULs and a line's end": WHOLE + b"\0" * 100 + b"\n\n",
    "a torn line, then NULs": WHOLE + b'{"step": 3, "tra' + b"\0" * 100,
    "a torn line, and the end of another": WHOLE + b'{"step": 3, "tra\0\0\0\0s": 1}\n{"step": 4}\n',
    "NULs before a record": b'{"step": 1}\n\0\0\0\0{"step": 2}\n{"step": 3, "x": 1}\n',
    "NULs after a record": b'{"step": 1}\0\0\n{"step": 2}\0\0',
    "a torn character": WHOLE + '{"step": 3, "n": "ä'.encode()[:-1],
    "a broken line after those that are kept": WHOLE + b"nonsense\n[1]\n" + b'{"step": 3}\n',
}


@pytest.mark.parametrize("case", LEFT)
def test_a_resumed_run_keeps_the_whole_lines_up_to_its_step(tmp_path: Path, case: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(LEFT[case])
    check_record(tmp_path, resumed_step=2)
    assert path.read_bytes() == LEFT[case], "looking changes nothing"
    record(tmp_path, [{"step": 3}], resumed_step=2)
    assert path.read_bytes() == KEPT
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


EARLIER = b'{"step": 0}\n' * 1000


@pytest.mark.parametrize("case", LEFT)
def test_of_a_long_record_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """What a run keeps is the same; parsing the whole record of a long run takes many minutes."""
    parse, parsed = reader._parse, []

    def note(text: bytes) -> dict[str, Any] | None:
        parsed.append(text)
        return parse(text)

    monkeypatch.setattr(reader, "_parse", note)
    monkeypatch.setattr(reader, "TAIL_BYTES", 32)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(EARLIER + LEFT[case])
    check_record(tmp_path, resumed_step=2)
    record(tmp_path, [{"step": 3}], resumed_step=2)
    assert path.read_bytes() == EARLIER + KEPT
    assert len(parsed) < 2000 if case == "NULs at the end" else len(parsed) < 100


def test_a_broken_line_at_the_end_of_a_long_record_has_its_number(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(reader, "TAIL_BYTES", 40)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(EARLIER + b'{"step": 1}\nbroken\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 1002 is no record .*: 'broken'"):
        check_record(tmp_path, resumed_step=2)
    path.write_bytes(EARLIER.replace(b"0", b"9") + b'{"step": 1}\n')  # of later steps: read to the beginning
    record(tmp_path, [{"step": 2}], resumed_step=1)
    assert path.read_bytes() == WHOLE


BROKEN_LINES = {
    "torn": b'{"step": 2, "tra',
    "not UTF-8": b'{"step": 2, "a": "\xff"}',
    "a list": b"[1, 2]",
    "no step": b'{"train/lm_loss": 2.0}',
    "a step in words": b'{"step": "two"}',
    "a step that is true": b'{"step": true}',
    "a step of many digits": b'{"step": 1' + b"0" * 5000 + b"}",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("case", BROKEN_LINES)
def test_a_broken_line_between_whole_ones_is_reported_and_nothing_is_lost(tmp_path: Path, case: str) -> None:
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 1}\n' + BROKEN_LINES[case] + b'\n{"step": 3}\n'
    path.write_bytes(content)
    for action in (
        lambda: check_record(tmp_path, resumed_step=3),
        lambda: record(tmp_path, [{"step": 4}], resumed_step=3),
        lambda: read_metrics(path),
    ):
        with pytest.raises(UserError) as caught:
            action()
        message = str(caught.value)
        assert message.startswith(f"{path}: line 2 is no record (") and message.endswith("; remove it")
        assert len(message) < 400 and "\n" not in message
    assert path.read_bytes() == content


def test_a_line_without_end_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "LONGEST_LINE", 64)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE + b"\0" * 1000 + b'{"step": 3}\n')
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    path.write_bytes(WHOLE + b'{"step": 3, "tra\0\0\0s": 1}\n{"step": 4}\n')
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 4]
    path.write_bytes(WHOLE + b"x" * 1000 + b'\n{"step": 3}\n')
    with pytest.raises(UserError, match="line 3 is no record .*: 'xxx"):
        read_metrics(path)


def test_a_record_that_is_a_pipe_is_reported(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics.jsonl: cannot read the metrics \(a pipe, device or socket"):
        check_record(tmp_path, resumed_step=1)


def test_tensorboard_holds_scalars_and_histograms(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = LogConfig(tensorboard=True)
    for resumed_step, steps in ((None, (1, 2, 3)), (1, (2, 3))):
        recorder = Recorder.open(tmp_path, log, "run", {}, resumed_step)
        for step in steps:
            recorder.log(
                {
                    "step": step,
                    "train/lm_loss": step + (resumed_step or 0) * 0.5,
                    "moe/layer_02/load": [6, 0, 2],
                    "moe/layer_02/width_histogram": [1, 5, 2],
                }
            )
        recorder.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/lm_loss")]
    assert shown == [(1, 1.0), (2, 2.5), (3, 3.5)], "the resumed run supersedes the steps it repeats"
    histogram = events.Histograms("experts_per_token")[0].histogram_value
    assert (histogram.num, histogram.sum) == (8, 0 * 1 + 1 * 5 + 2 * 2)
    buckets = zip(histogram.bucket_limit, histogram.bucket, strict=True)
    assert [bucket for bucket in buckets if bucket[1]] == [(1, 1), (2, 5), (3, 2)]


def test_a_missing_tensorboard_is_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    record(tmp_path, [{"step": 1}])
    with pytest.raises(UserError, match=r"log\.tensorboard.*pip install tensorboard"):
        Recorder.open(tmp_path, LogConfig(tensorboard=True), "run", {}, False)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]
