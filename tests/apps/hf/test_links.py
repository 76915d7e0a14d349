"""Links in a Hugging Face folder, and tokenizers that are none: one line each, and nothing is written."""

import json
from pathlib import Path

import pytest

from megamoe.apps.hf import folder as folder_module
from megamoe.apps.hf.folder import checked_link, read_object, read_other_files
from megamoe.errors import UserError

TOKENIZER = {
    "version": "1.0",
    "model": {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"},
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "secret.json").write_text(json.dumps(TOKENIZER))
    return tmp_path / "secret.json"


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "model").mkdir()
    for name, read in (("tokenizer.json", read_other_files), ("config.json", read_object)):
        path = tmp_path / "model" / name
        path.symlink_to(outside)
        with pytest.raises(UserError, match=f"{name}: a link to {outside}, outside its folder"):
            read(tmp_path / "model" if read is read_other_files else path)


def test_links_of_the_hubs_cache_and_inside_the_folder_are_followed(tmp_path: Path, outside: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b/snapshots/1f", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "9c").write_text(json.dumps(TOKENIZER))
    (snapshot / "tokenizer.json").symlink_to("../../blobs/9c")
    (snapshot / "vocab.json").symlink_to("tokenizer.json")
    assert set(read_other_files(snapshot)) == {"tokenizer.json", "vocab.json"}
    (snapshot / "merges.txt").symlink_to(outside)
    with pytest.raises(UserError, match="merges.txt: a link to"):
        read_other_files(snapshot)
    other = tmp_path / "models--c--d/snapshots/2e"
    other.mkdir(parents=True)
    (other / "config.json").symlink_to(blobs / "9c")
    with pytest.raises(UserError, match="outside its folder"):
        checked_link(other / "config.json")


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", "no json at all"), ("tokenizer.json", "{}"), ("generation_config.json", "[1")],
)
def test_files_are_parsed_before_they_are_kept(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=name):
        read_other_files(tmp_path)


def test_a_tokenizer_has_a_bound_on_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    monkeypatch.setattr(folder_module, "LARGEST_FILE", 20)
    with pytest.raises(UserError, match="tokenizer.json"):
        read_other_files(tmp_path)


def test_a_link_to_itself_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("config.json")
    with pytest.raises(
        UserError, match=r"config.json: missing or damaged \(Too many levels of symbolic links\)"
    ):
        read_object(tmp_path / "config.json")
