"""A seed's run: the configuration, of the task, the pretrained model and overrides; a run that stops."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megamoe.apps.finetune import finetune as module
from megamoe.apps.finetune.examples import read_examples
from megamoe.apps.finetune.finetune import run_config, run_tree
from megamoe.apps.finetune.task import load_task
from megamoe.config import RunConfig
from megamoe.errors import ExitCode, UserError
from tests.support.apps.tasks import make_task
from tests.support.tiny import tiny

PRETRAINED = (
    "model.architecture=encoder",
    "model.hidden_dropout=0.3",
    "data.document_aware=false",
    "data.sequence_length=32",
    "train.objective=masked",
    "optimizer.lr=0.5",
)


def run_of(
    folder: Path, *overrides: str, model: Sequence[str] = (), ranks: int = 1, **changes: Any
) -> RunConfig:
    """model: overrides of the pretrained model's configuration. changes: of the task."""
    task = load_task(make_task(folder, "classification", **changes), [])
    examples = read_examples(task)
    places = (folder / "step_00000001", folder / "output")
    tree = run_tree(task, examples, tiny(*PRETRAINED, *model), "bytes", 258, *places)
    return run_config(task, tree, 7, overrides, ranks)


def test_every_key_of_the_task_reaches_the_run(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        epochs=2,
        learning_rate=3e-5,
        schedule="cosine",
        warmup_share=0.25,
        weight_decay=0.02,
        dropout=0.15,
        frozen=["router"],
        too_long="truncate",
        sequence_length=20,
    )
    optimizer, data = run.optimizer, run.data
    assert (optimizer.lr, optimizer.schedule, optimizer.warmup_share) == (3e-5, "cosine", 0.25)
    assert (optimizer.weight_decay, run.moe.frozen, run.seed, run.name) == (0.02, ["router"], 7, "seed_7")
    assert (run.model.hidden_dropout, run.model.attention_dropout) == (0.15, 0.15)
    assert (run.train.epochs, run.train.global_batch_size, run.train.micro_batch_size) == (2, 4, 2)
    assert (data.sequence_length, run.train.objective.options.too_long) == (20, "truncate")
    assert (run.model.num_labels, run.model.predicts) == (2, "label")
    assert (run.evaluation.every, run.evaluation.batches) == (3, 2)  # 12 examples in batches of 4; 5 of valid
    assert run.checkpoint.init is not None and run.checkpoint.init.path == str(tmp_path / "step_00000001")


@pytest.mark.parametrize(("epochs", "batch"), [(5, 7), (0.5, 3), (2, 12), (3, 20)])
def test_every_checkpoint_is_kept_until_the_best_is_chosen(tmp_path: Path, epochs: float, batch: int) -> None:
    """Of 12 examples; an epoch that is no whole number of batches has more than one checkpoint."""
    checkpoint = run_of(
        tmp_path, select="best", epochs=epochs, batch_size=batch, micro_batch_size=None
    ).checkpoint
    steps = math.floor(12 * epochs / batch)
    saved = {*range(checkpoint.every, steps + 1, checkpoint.every), steps}
    assert checkpoint.keep >= len(saved)


@pytest.mark.parametrize(
    "more", [{"optimizer": {"beta2": 0.5}, "train": {"micro_batch_size": 1}},
             {"optimizer.beta2": 0.5, "train.micro_batch_size": 1}]
)  # fmt: skip
def test_further_keys_leave_the_others_as_they_are(tmp_path: Path, more: dict[str, Any]) -> None:
    run = run_of(tmp_path, run=more, learning_rate=3e-5, warmup_share=0.25)
    assert (run.optimizer.beta2, run.optimizer.lr, run.optimizer.warmup_share) == (0.5, 3e-5, 0.25)
    assert run.train.micro_batch_size == 1 and run.train.global_batch_size == 4


def test_overrides_come_last_and_a_batch_is_divided_over_the_ranks(tmp_path: Path) -> None:
    run = run_of(
        tmp_path, "optimizer.beta2=0.6", ranks=2, run={"optimizer.beta2": 0.5}, micro_batch_size=None
    )
    assert (run.optimizer.beta2, run.train.micro_batch_size) == (0.6, 2)


@pytest.mark.parametrize(("ranks", "size"), [(4, 2), (1, 4)])
def test_tensor_parallel_ranks_share_a_batch(tmp_path: Path, ranks: int, size: int) -> None:
    """One rank is too few, which the run itself refuses."""
    run = run_of(tmp_path, "parallel.tensor=2", ranks=ranks, micro_batch_size=None)
    assert run.train.micro_batch_size == size


def test_nothing_of_a_dense_model_is_frozen(tmp_path: Path) -> None:
    """So a task file serves for the dense baseline too."""
    frozen: dict[str, Any] = {"frozen": ["router", "experts"]}
    assert run_of(tmp_path, **frozen).moe.frozen == ["router", "experts"]
    assert run_of(tmp_path, model=["moe.layers={at: []}"], **frozen).moe.frozen == []


@pytest.mark.parametrize("key", ["name", "output", "seed", "checkpoint.init.path", "data.sources"])
def test_keys_that_the_tool_sets_itself_are_refused(tmp_path: Path, key: str) -> None:
    """A run of another name or folder would be trained and then not found."""
    with pytest.raises(UserError, match=f"^{key}: tools/finetune.py sets this key of a seed's run itself"):
        run_of(tmp_path, f"{key}=5")
    with pytest.raises(UserError, match=f"^{key}: "):
        run_of(tmp_path, run={key: 5})


@pytest.mark.parametrize(("state", "code"), [("stopped", ExitCode.STOPPED), ("finished", ExitCode.FINISHED)])
def test_a_stopped_seed_is_not_evaluated(
    state: str,
    code: ExitCode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By a stand-in of the training, which ends with FINISHED after train.exit_after_steps too."""
    evaluated: list[int] = []

    def train(*unused: Any, **also_unused: Any) -> ExitCode:
        (tmp_path / "seed_1").mkdir()
        beat = {"state": state, "step": 2, "steps": 6}
        (tmp_path / "seed_1/heartbeat.json").write_text(json.dumps(beat))
        return ExitCode.FINISHED

    work = SimpleNamespace(
        output=tmp_path, configs={1: None}, about={}, open=lambda _: None, load=lambda _: None,
        evaluate=evaluated.append,
    )  # fmt: skip
    monkeypatch.setattr(module, "_Work", lambda *_: work)
    monkeypatch.setattr(module, "train", train)
    monkeypatch.setattr(module, "_on_first", lambda _, action: action())
    for name in ("check_libraries", "results", "save_results", "table_of"):
        monkeypatch.setattr(module, name, lambda *_: None)
    examples = SimpleNamespace(left_out=["'a', line 2: no JSON", "'b', line 1: no JSON"])
    monkeypatch.setattr(module, "read_examples", lambda *_: examples)
    session: Any = SimpleNamespace(world=SimpleNamespace(say=print, is_first=True))
    task: Any = SimpleNamespace(seeds=[1])
    assert module.finetune(task, session, tmp_path) is code
    assert evaluated == ([] if state == "stopped" else [1])
    told = "seed 1: stopped at step 2 of 6; repeat the command to go on"
    printed = capsys.readouterr().out
    assert (told in printed) == (state == "stopped")
    assert printed.count("bad lines left out: 2, the first: 'a', line 2: no JSON\n") == 1
