"""How long a run is: epochs in steps by hand, and a whole run of one epoch."""

import json
from pathlib import Path

import pytest

from megamoe.config import RunConfig
from megamoe.data.datasets import samples_per_epoch
from megamoe.errors import ExitCode, UserError, raise_first
from megamoe.optim.schedule import BatchSchedule, run_steps
from megamoe.train.loop import train
from megamoe.validation.schedule import warmup_problems
from tests.support.data.sources import make_data
from tests.support.tiny import restored_process, tiny

# 101 tokens: 12 samples of 8, of which a token is left over.
DOCUMENT = "x" * 100


def run_of(tmp_path: Path, *overrides: str) -> RunConfig:
    if not (tmp_path / "data.idx").exists():
        make_data(tmp_path / "data", [DOCUMENT])
    data = f"data={{sources: [{tmp_path}/data], split: [1, 0, 0], sequence_length: 8, workers: 0}}"
    return tiny(data, "model.vocab_size=null", "train.steps=null", f"output={tmp_path}/runs", *overrides)


def steps_of(config: RunConfig, data_parallel: int = 1) -> int:
    schedule = BatchSchedule.from_config(config.train, data_parallel)
    steps = run_steps(config, schedule, lambda: samples_per_epoch(config.data))
    raise_first(warmup_problems(config, steps))
    return steps


@pytest.mark.parametrize(
    ("epochs", "batch", "expected"),
    [(1, 2, 6), (2, 2, 12), (0.5, 2, 3), (1, 5, 2), (2, 5, 4), (2.5, 10, 3), (0.25, 3, 1)],
)
def test_as_many_steps_as_whole_batches_fit(tmp_path: Path, epochs: float, batch: int, expected: int) -> None:
    sizes = ("train.micro_batch_size=1", f"train.global_batch_size={batch}")
    assert steps_of(run_of(tmp_path, f"train.epochs={epochs}", *sizes)) == expected


def test_steps_with_a_growing_batch_and_as_configured(tmp_path: Path) -> None:
    grows = ("train.global_batch_size=6", "train.batch_rampup={start: 2, increment: 2, samples: 8}")
    assert steps_of(run_of(tmp_path, "train.epochs=1", *grows)) == 3  # 2, 2, 4; then 6 do not fit
    assert steps_of(run_of(tmp_path, "train.tokens=79", *grows)) == 3  # 9 samples of 8 tokens
    assert steps_of(tiny("train.steps=7")) == 7
    assert steps_of(tiny("train.steps=null")) == 100


def test_what_does_not_fit_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^train.epochs: 0.1 of 12 training samples are 1, fewer than the"):
        steps_of(run_of(tmp_path, "train.epochs=0.1"))
    with pytest.raises(UserError, match="^train.tokens: 15 / data.sequence_length 8 are 1, fewer than the"):
        steps_of(run_of(tmp_path, "train.tokens=15"))
    with pytest.raises(UserError, match="^optimizer.warmup_steps: 7 is more than .*warmup_steps=6 or less$"):
        steps_of(run_of(tmp_path, "train.epochs=1", "optimizer.warmup_steps=7"))


def test_a_run_of_an_epoch_stops_and_resumes_at_its_end(tmp_path: Path) -> None:
    """Six steps with a warm-up of two; stopped after three and resumed, from the same configuration."""
    config = ("train.epochs=1", "optimizer.warmup_share=0.3", "optimizer.schedule=linear", "name=a")
    for more in ("train.exit_after_steps=3", "checkpoint.resume=auto"):
        with restored_process():
            assert train(run_of(tmp_path, *config, more)) == ExitCode.FINISHED
    text = (tmp_path / "runs/a/metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["train/lr"] for row in rows] == pytest.approx(
        [3e-4 * share for share in (0.5, 1, 0.75, 0.5, 0.25, 0)], abs=1e-12
    )


def test_a_smaller_batch_after_a_resume_has_enough_samples(tmp_path: Path) -> None:
    """The mock data are exactly as long as the run: 2 steps of 4, then 4 of 2."""
    for more in (["train.global_batch_size=4", "train.exit_after_steps=2"], ["train.global_batch_size=2"]):
        with restored_process():
            own = ("train.steps=6", "name=a", f"output={tmp_path}/runs", "checkpoint.resume=auto")
            assert train(tiny(*own, *more)) == ExitCode.FINISHED
    rows = [json.loads(line) for line in (tmp_path / "runs/a/metrics.jsonl").read_text().splitlines()]
    assert [row["tokens"] // 8 for row in rows] == [4, 8, 10, 12, 14, 16]


def test_epochs_count_the_samples_of_the_batches_before(tmp_path: Path) -> None:
    """An epoch is 12 samples: 2 steps of 2 and 2 of 4, where 3 steps of 4 would end after 8 samples."""
    for more in (["train.global_batch_size=2", "train.exit_after_steps=2"], ["train.global_batch_size=4"]):
        with restored_process():
            config = run_of(tmp_path, "train.epochs=1", "name=a", "checkpoint.resume=auto", *more)
            assert train(config) == ExitCode.FINISHED
    rows = [json.loads(line) for line in (tmp_path / "runs/a/metrics.jsonl").read_text().splitlines()]
    assert [row["tokens"] // 8 for row in rows] == [2, 4, 8, 12]
