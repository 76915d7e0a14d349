"""Which files of an input are documents: endings in any case, unknown ones, null, and lines that are none."""

from pathlib import Path

import pytest

from megamoe.errors import UserError
from tests.support.data.sources import prepared

LINES = b'{"text": "a"}\n{"text": "b"}\n'


@pytest.mark.parametrize("name", ["x.ndjson", "X.JSONL", "x.JsonLines"])
def test_json_lines_by_any_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(LINES)
    card = prepared(tmp_path / "out", tmp_path / name)
    assert (card.documents, card.text_bytes) == (2, 2)


def test_unknown_endings(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("README.md", "LICENSE", "code.py"):
        (clone / name).write_text("# A")
    (clone / "part.JSONL").write_bytes(LINES)
    with pytest.raises(UserError, match=r"3 files with unknown endings .*README\.md.*--other-files text"):
        prepared(tmp_path / "out", clone)
    with pytest.raises(UserError, match=r"1 files with unknown endings .*code\.py"):
        prepared(tmp_path / "out", clone / "code.py")
    assert not list(tmp_path.glob("*out*"))
    assert prepared(tmp_path / "text", clone, other_files="text").documents == 5
    # Named itself, also by a glob, plain text without an ending or with .md is text.
    assert prepared(tmp_path / "named", clone / "*.md", clone / "LICENSE").documents == 2


def test_null_and_bad_lines(tmp_path: Path) -> None:
    bad = [b"{", b'{"other": 1}', b'{"text": 1}', b'{"text": "\\ud800"}', b'{"text": "\xff"}']
    (tmp_path / "in.jsonl").write_bytes(b'{"text": null}\n' + LINES)
    card = prepared(tmp_path / "null", tmp_path / "in.jsonl")
    assert (card.documents, card.skipped) == (2, {"null": 1})
    with (tmp_path / "in.jsonl").open("ab") as file:
        file.write(b"\n".join(bad) + b"\n" + LINES)
    with pytest.raises(UserError, match=r"in\.jsonl:4: not JSON: .*--bad-lines skip"):
        prepared(tmp_path / "out", tmp_path / "in.jsonl")
    card = prepared(tmp_path / "skip", tmp_path / "in.jsonl", bad_lines="skip")
    assert (card.documents, card.skipped["bad line"]) == (4, len(bad))
