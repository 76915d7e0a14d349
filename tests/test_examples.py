"""The example runs are valid: each can start unchanged, and the demos match in active size."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megamoe.config import load_config
from megamoe.config.shapes import moe_layer_numbers
from megamoe.data.vocabulary import Vocabulary
from megamoe.model.size import model_size
from megamoe.objectives.objective import TokenShares
from megamoe.train import resolved, saver
from megamoe.train.command import main
from megamoe.validation import early, memory

ROOT = Path(__file__).parents[1]
NO_RUNS = ("kubernetes", "wandb", "tasks", "shared", "lm_eval", "studies")  # folders of other YAML files
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.yaml") if path.parent.name not in NO_RUNS)
DEMO_VOCABULARY = 4096


def test_every_example_passes_the_check(
    restored_process: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With data that is taken to be there, on as many ranks as the layout needs, on a machine of any size."""
    monkeypatch.chdir(ROOT)
    without_data(monkeypatch)
    made = SimpleNamespace(samples_per_epoch=lambda: 10**9)
    monkeypatch.setattr(early, "check_files", lambda path, card: None)
    monkeypatch.setattr(resolved, "source_problems", lambda config: [])
    monkeypatch.setattr(resolved, "data_vocabulary", lambda config: Vocabulary(DEMO_VOCABULARY, 0, None))
    monkeypatch.setattr(resolved, "num_added_ids", lambda config, vocabulary: 0)
    monkeypatch.setattr(resolved, "build_objective", lambda *unused: made)
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    monkeypatch.setattr(saver, "check_init", lambda *unused: None)
    of_cards = SimpleNamespace(shares=lambda *unused: TokenShares())
    monkeypatch.setattr(memory, "objective_class", lambda config: of_cards)
    codes = {path.stem: main(["--config", str(path), "--check"]) for path in EXAMPLES}
    found = capsys.readouterr()
    assert not any(codes.values()), found.err
    assert sum(line.startswith("valid: ") for line in found.out.splitlines()) == len(EXAMPLES)


def without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a pattern such as mono/* name one dataset; the data need not be prepared."""
    monkeypatch.setattr("glob.glob", lambda pattern: [pattern.replace("*", "de")])


def test_names_are_those_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    without_data(monkeypatch)
    assert [load_config(path).name for path in EXAMPLES] == [path.stem for path in EXAMPLES]


def test_the_demo_and_its_dense_twin_have_the_same_active_flops() -> None:
    """A token meets as many weights in both, but for the routers: hidden size x experts in each block."""
    moe, dense = (load_config(ROOT / "examples" / name) for name in ("demo.yaml", "demo_dense.yaml"))
    assert not moe_layer_numbers(dense)
    active, whole = model_size(moe, DEMO_VOCABULARY).active, model_size(dense, DEMO_VOCABULARY).total
    assert active - whole == 4 * 256 * 8
    assert model_size(moe, DEMO_VOCABULARY).total > 1.5 * whole


def test_dense_and_moe_twins_train_alike() -> None:
    moe, dense = (load_config(ROOT / "examples" / name) for name in ("demo.yaml", "demo_dense.yaml"))
    for section in ("seed", "data", "model", "optimizer", "train", "evaluation"):
        assert getattr(moe, section) == getattr(dense, section), section


def test_labels_start_from_the_example_of_the_masked_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same encoder, and the checkpoint that ends the other example's run."""
    without_data(monkeypatch)
    folder = ROOT / "examples" / "catalogues"
    masked, labels = (
        load_config(folder / f"{name}.yaml") for name in ("mlm_small_dense", "labels_small_dense")
    )
    assert replace(masked.model, head_transform=False) == replace(labels.model, num_labels=None)
    last = f"{masked.output}/{masked.name}/checkpoints/step_{masked.train.steps:08d}"
    assert labels.checkpoint.init.path == last
