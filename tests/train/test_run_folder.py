"""The run's folder: which ones are refused or continued, and that a refusal changes nothing."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from megamoe.errors import UserError
from megamoe.train.run_folder import RunFolder, choose_run_folder, prepare_run_folder
from tests.support.checkpoint_files import META, write_checkpoint
from tests.support.tiny import tiny


def choose(output: Path, *overrides: str) -> RunFolder:
    return choose_run_folder(tiny(f"output={output}", "name=a", *overrides))


def make_run(folder: Path, *steps: int) -> dict[str, bytes]:
    """A run's folder with complete checkpoints of `steps`; returns what it holds."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: a\n")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    for step in steps:
        name = f"step_{step:08d}"
        write_checkpoint(folder / "checkpoints" / name, {"model/a": torch.ones(3)}, step=step)
        (folder / "checkpoints" / "latest").write_text(name)
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_new_folder(tmp_path: Path) -> None:
    folder = choose(tmp_path / "runs")
    assert (folder.path, folder.resume_from) == (tmp_path / "runs" / "a", None)
    assert not (tmp_path / "runs").exists()


def test_an_existing_run_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    before = make_run(tmp_path / "a", 5)
    with pytest.raises(UserError, match=r"run folder .*/a exists: add --resume .*overwrite=true .*name="):
        choose(tmp_path)
    assert contents(tmp_path / "a") == before


def test_overwrite_begins_anew_but_only_when_prepared(tmp_path: Path) -> None:
    before = make_run(tmp_path / "a", 5)
    config = tiny(f"output={tmp_path}", "name=a", "overwrite=true")
    folder = choose_run_folder(config)
    assert folder.resume_from is None
    assert contents(tmp_path / "a") == before
    prepare_run_folder(folder, config, {"parameters_total": 7})
    assert set(contents(tmp_path / "a")) == {"config.yaml", "summary.json"}
    assert yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())["moe"]["num_experts"] == 4
    assert json.loads((tmp_path / "a" / "summary.json").read_text()) == {"parameters_total": 7}


@pytest.mark.parametrize("override", ["overwrite=true", "checkpoint.resume=auto"])
def test_a_folder_that_is_no_run_is_never_emptied(tmp_path: Path, override: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("dear")
    with pytest.raises(UserError, match=r"/a is no run's folder \(it has no config.yaml\)"):
        choose(tmp_path, override)
    assert contents(tmp_path / "a") == {"thesis.tex": b"dear"}


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    with pytest.raises(UserError, match="/a is no run's folder"):
        choose(tmp_path, "overwrite=true")


def test_resume_auto_takes_the_latest_checkpoint_and_keeps_the_record(tmp_path: Path) -> None:
    before = make_run(tmp_path / "a", 5, 10)
    config = tiny(f"output={tmp_path}", "name=a", "checkpoint.resume=auto")
    folder = choose_run_folder(config)
    assert folder.resume_from == tmp_path / "a" / "checkpoints" / "step_00000010"
    prepare_run_folder(folder, config, {})
    after = contents(tmp_path / "a")
    assert all(after[name] == before[name] for name in before.keys() - {"config.yaml"})


@pytest.mark.parametrize("before", [(), (5,)])
@pytest.mark.parametrize("override", ["overwrite=true", "checkpoint.resume=auto"])
def test_a_launch_that_saves_while_another_starts_is_not_gone_back_from(
    tmp_path: Path, override: str, before: tuple[int, ...]
) -> None:
    """The folder is chosen minutes before it is locked, and the launch before may end in between."""
    make_run(tmp_path / "a", *before)
    folder = choose(tmp_path, override)
    folder.check_unchanged()
    checkpoints = tmp_path / "a" / "checkpoints"
    write_checkpoint(checkpoints / "step_00000010", {"model/a": torch.ones(3)}, step=10)
    (checkpoints / "latest").write_text("step_00000010")
    with pytest.raises(UserError, match="another launch saves or deletes checkpoints in it"):
        folder.check_unchanged()
    choose(tmp_path, override).check_unchanged()


def test_if_latest_names_nothing_the_newest_complete_one_is_used(tmp_path: Path) -> None:
    make_run(tmp_path / "a", 5, 10)
    folder = tmp_path / "a" / "checkpoints"
    for file in ("checkpoint.json", "SHA256SUMS"):
        os.utime(folder / "step_00000010" / file, (0, 0))  # saved first
    (folder / "latest").write_text("step_00000007")
    assert choose(tmp_path, "checkpoint.resume=auto").resume_from == folder / "step_00000005"


def test_resume_auto_without_a_checkpoint_starts_from_nothing(tmp_path: Path) -> None:
    assert choose(tmp_path, "checkpoint.resume=auto").resume_from is None
    make_run(tmp_path / "a")  # killed before its first checkpoint
    assert choose(tmp_path, "checkpoint.resume=auto").resume_from is None


DAMAGES: dict[str, tuple[str, bytes | None, str]] = {
    "no meta": ("checkpoint.json", None, "is not a complete checkpoint"),
    "other meta": ("checkpoint.json", json.dumps(META | {"step": 9}).encode(), "its SHA-256 is not"),
    "another format": ("checkpoint.json", json.dumps(META | {"format": 1}).encode(), "checkpoint format 1, "),
    "no shard": ("shard_00000.safetensors", None, "shard_00000.safetensors: missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_or_refused_if_it_is_only_one(tmp_path: Path, damage: str) -> None:
    """The damage is visible before any tensor is read."""
    make_run(tmp_path / "a", 5, 10)
    newest = tmp_path / "a" / "checkpoints" / "step_00000010"
    older = newest.with_name("step_00000005")
    file, content, message = DAMAGES[damage]
    if content is None:
        (newest / file).unlink()
    else:
        (newest / file).write_bytes(content)
    before = contents(tmp_path)
    folder = choose(tmp_path, "checkpoint.resume=auto")
    assert (folder.resume_from, folder.continues) == (older, True)
    assert folder.candidates == (newest, older)
    shutil.rmtree(older)
    for resume in ("auto", newest):
        with pytest.raises(UserError, match=message) as refusal:
            assert choose(tmp_path, f"checkpoint.resume={resume}").resume_from
        assert str(newest) in str(refusal.value) and "\n" not in str(refusal.value)
    assert contents(tmp_path).keys() == {name for name in before if older.name not in name}


def test_a_folder_without_any_of_its_files_is_no_checkpoint(tmp_path: Path) -> None:
    make_run(tmp_path / "a", 5)
    left = tmp_path / "a" / "checkpoints" / "step_00000010"
    left.mkdir()
    (left / "shard_00000.safetensors").write_bytes(b"")
    assert choose(tmp_path, "checkpoint.resume=auto").candidates == (left.with_name("step_00000005"),)


def test_resume_from_a_named_checkpoint(tmp_path: Path) -> None:
    make_run(tmp_path / "a", 5, 10)
    named = tmp_path / "a" / "checkpoints" / "step_00000005"
    assert choose(tmp_path, f"checkpoint.resume={named}").resume_from == named


def test_unwritable_output(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = tiny(f"output={tmp_path / 'file'}", "name=a")
    with pytest.raises(UserError, match=r"output: cannot write the run folder .*/file/a: Not a directory"):
        prepare_run_folder(choose_run_folder(config), config, {})


def test_what_is_resumed_from_is_not_overwritten(tmp_path: Path) -> None:
    """A converted checkpoint beside the run's own."""
    make_run(tmp_path / "a", 5)
    converted = write_checkpoint(tmp_path / "a" / "on_4", {"model/a": torch.ones(3)})
    with pytest.raises(UserError, match=r"on_4 lies in the run folder .*/a, which overwrite=true would"):
        choose(tmp_path, f"checkpoint.resume={converted}", "overwrite=true")
