"""Checks of a checkpoint's configuration for a run that starts from its weights."""

import functools
import operator
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe import registry
from megamoe.checkpoint.format.reader import WEIGHT
from megamoe.config import RunConfig, to_dict
from megamoe.errors import UserError
from megamoe.model.size import part_shapes
from megamoe.train.resume import RULES, check_init, check_resume, rule_of
from tests.support.checkpoint_files import write_checkpoint
from tests.support.refusals import Case, cases, told
from tests.support.tiny import VOCABULARY, tiny


def checkpoint_of(tmp_path: Path, config: dict[str, Any], vocabulary: int = VOCABULARY) -> Path:
    """A checkpoint of such a run without tensors: its JSON is read before them."""
    return write_checkpoint(tmp_path / "elsewhere/step_00000001", {}, vocabulary=vocabulary, config=config)


@pytest.mark.parametrize("case", cases("resume"))
def test_what_goes_on_from_a_checkpoint(tmp_path: Path, case: Case, expect_message: Any) -> None:
    """Of a run `saved`, whose configuration was `without` some keys yet; `start`: from its weights alone."""
    row = case.row
    config = to_dict(tiny(*row.get("saved", ())))
    for key in row.get("without", ()):
        *sections, last = key.split(".")
        del functools.reduce(operator.getitem, sections, config)[last]
    saved = checkpoint_of(tmp_path, config, row.get("vocabulary", VOCABULARY))
    run, vocabulary = row.get("run", ()), row.get("run_vocabulary", VOCABULARY)
    if row.get("start"):
        start = tiny(f"checkpoint.init.path={saved}", *run)
        message = told(lambda: check_init(start, vocabulary, tmp_path / "run"), tmp_path)
    else:
        message = told(lambda: check_resume(tiny(*run), vocabulary, saved), tmp_path)
    expect_message(case, message)


def test_another_optimizer_may_resume_with_the_moments(tmp_path: Path) -> None:
    """AdamW and Adam keep the same state; a checkpoint from before the key had AdamW."""
    config = to_dict(tiny("moe.layers=none"))
    del config["optimizer"]["name"]
    dense = checkpoint_of(tmp_path, config)
    told = ["changed since the checkpoint: optimizer adamw -> adam"]
    for name, lines in (("adamw", []), ("adam", told)):
        assert check_resume(tiny("moe.layers=none", f"optimizer.name={name}"), VOCABULARY, dense) == lines


def leaves(tree: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in tree.items():
        below = isinstance(value, dict) and value
        found += leaves(value, f"{prefix}{key}.") if below else [f"{prefix}{key}"]
    return found


def test_every_key_has_a_rule_and_every_rule_a_key() -> None:
    keys = leaves(to_dict(RunConfig()))
    assert {rule_of(key) for key in keys} == {"same", "function", "told", "launch"}
    unused = [rule for rule in RULES if not any(f"{key}.".startswith(f"{rule}.") for key in keys)]
    assert unused == []


@pytest.fixture
def routed(tmp_path: Path) -> Path:
    """A checkpoint with the tensors of its router."""
    shapes = part_shapes(tiny(), VOCABULARY)
    tensors = {
        f"{WEIGHT}decoder.layers.{block}.mlp.{name}": torch.zeros(shape)
        for block in (0, 1)
        for name, shape in shapes.items()
    }
    folder = tmp_path / "routed" / "step_00000001"
    return write_checkpoint(folder, tensors, vocabulary=VOCABULARY, config=to_dict(tiny()))


def test_each_change_is_told(routed: Path) -> None:
    changed = tiny("optimizer.lr=0.5", "train.micro_batch_size=3", "moe.losses.z_loss=0.1", "name=other")
    before, loss = tiny(), to_dict(changed)["moe"]["losses"]["z_loss"]
    assert check_resume(changed, VOCABULARY, routed) == [
        f"changed since the checkpoint: moe.losses.z_loss None -> {loss}",
        f"changed since the checkpoint: optimizer.lr {before.optimizer.lr} -> 0.5",
        f"changed since the checkpoint: train.micro_batch_size {before.train.micro_batch_size} -> 3",
    ]
    assert check_resume(tiny(), VOCABULARY, routed) == []


def test_a_changed_plugin_is_told(tmp_path: Path, own_registry: None, monkeypatch: Any) -> None:
    """A file is known by its name, wherever it lies. Of a package each file counts."""
    monkeypatch.syspath_prepend(str(tmp_path))
    package, moved = tmp_path / "parts_that_change", tmp_path / "moved"
    for folder in (package, moved):
        folder.mkdir()
    for file in (package / "__init__.py", package / "old.py", tmp_path / "mine.py", moved / "mine.py"):
        file.write_text("")

    def config_of(file: Path) -> RunConfig:
        return tiny("moe.layers=none", f"plugins=[{file}, {package.name}]")

    config = config_of(tmp_path / "mine.py")
    folder, without = tmp_path / "step_00000001", checkpoint_of(tmp_path, to_dict(config))
    digests = registry.plugin_digests(config.plugins)
    assert digests.keys() == {"mine.py", f"{package.name}: __init__.py", f"{package.name}: old.py"}
    own = config_of(moved / "mine.py")
    write_checkpoint(folder, {}, vocabulary=VOCABULARY, config=to_dict(own), plugins=digests)
    assert check_resume(own, VOCABULARY, folder) == []
    (moved / "mine.py").write_text("x = 1")
    (package / "old.py").rename(package / "new.py")
    own = config_of(moved / "mine.py")
    assert check_resume(own, VOCABULARY, folder) == [
        f"changed since the checkpoint: plugin {name}"
        for name in (
            "mine.py (another SHA-256)",
            f"{package.name}: new.py (new)",
            f"{package.name}: old.py (removed)",
        )
    ]
    (only,) = check_resume(own, VOCABULARY, without)  # from before the digests were stored
    assert only.startswith("changed since the checkpoint: plugins [")


@pytest.mark.parametrize(
    ("change", "key", "before", "after"),
    [
        ("moe.router.score_function=sigmoid", "moe.router.score_function", "softmax", "sigmoid"),
        ("moe.router.selector={name: top_k, k: 3}", "moe.router.selector.k", "2", "3"),
        ("moe.router.capacity={name: per_expert, factor: 1}", "moe.router.capacity", "none", "per_expert"),
    ],
)
def test_another_function_needs_leave(routed: Path, change: str, key: str, before: str, after: str) -> None:
    with pytest.raises(UserError) as refused:
        check_resume(tiny(change), VOCABULARY, routed)
    assert str(refused.value) == (
        f"{routed}: saved with {key} {before}, this run has {after}; the model would compute another "
        "function: resume with the configuration that saved it, or say checkpoint.allow_changes=true"
    )
    told = check_resume(tiny(change, "checkpoint.allow_changes=true"), VOCABULARY, routed)
    assert told == [f"changed since the checkpoint: {key} {before} -> {after}"]
