"""Files are put in place in one move, and read with bounds: no pipe, and nothing too deep or too large."""

import json
import os
import re
from pathlib import Path

import pytest

from megamoe.io import DEEPEST, read_json, real, replacing

PACKAGE = Path(__file__).parents[1] / "megamoe"
# What parses text of megamoe's own alone, and the two bounded readers.
PARSERS = {
    *("apps/chat/sandbox.py", "apps/chat/conversation.py", "apps/chat/rendering.py", "apps/lab/command.py"),
    *("data/plain_text.py", "apps/prepare/tables.py", "apps/prepare/table_child.py"),
    *("io.py", "config/yaml_text.py", "apps/hf/custom/export.py", "apps/plan/assumptions.py"),
    *("apps/cluster/preflight.py", "apps/routing_record/record.py", "parallel/rank_consistency.py"),
    *("parallel/zero/deepspeed_config.py", "train/resolved.py"),
}


@pytest.mark.parametrize("synced", [True, False])
def test_a_reader_meets_the_old_content_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: bool
) -> None:
    path, flushed = tmp_path / "a.json", []
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(path.read_bytes()))
    with replacing(path, synced) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["a.json"]
    assert flushed == ([b"old"] if synced else []), "on the disk before it is in place"


def test_what_fails_leaves_the_old_content_and_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    with pytest.raises(OSError) as raised, replacing(path) as file:
        file.write(b"half")
        raise OSError(28, "No space left on device")
    assert (raised.value.filename, raised.value.strerror) == (str(path), "No space left on device")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("levels", [DEEPEST, DEEPEST + 1, 900, 100_000])
def test_json_is_read_to_a_depth(tmp_path: Path, levels: int) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": ' * (levels - 1) + "[]" + "}" * (levels - 1))
    if levels == DEEPEST:
        assert read_json(path, 1 << 20)
    else:
        with pytest.raises(ValueError, match="nested too deeply"):
            read_json(path, 1 << 20)


def test_what_is_no_plain_file_of_json_is_refused_at_once(tmp_path: Path) -> None:
    loop, pipe, twice = (tmp_path / name for name in ("loop", "pipe", "twice"))
    loop.symlink_to(loop)
    os.mkfifo(pipe)
    twice.write_text('{"a": 1, "a": 2}')
    for path, words in ((loop, "Too many levels"), (pipe, "a pipe"), (twice, "'a' stands twice")):
        with pytest.raises((OSError, ValueError), match=words):
            read_json(path, 100, unique=True)
    with pytest.raises(ValueError, match="larger than 3 bytes"):
        read_json(twice, 3)
    assert read_json(twice, 100) == {"a": 2} and real(loop).name == "loop"


@pytest.mark.parametrize(
    ("pattern", "allowed"),
    [(r"\bjson\.loads?\(|\byaml\.\w*load\(", PARSERS), (r"(?<!\(__file__\))\.resolve\(", set[str]())],
)
def test_one_file_reads_json_and_follows_links(pattern: str, allowed: set[str]) -> None:
    """`Path.resolve` raises in a loop of links, `json.loads` of deep text, and neither is an OSError."""
    using = {path for path in PACKAGE.rglob("*.py") if re.search(pattern, path.read_text())}
    assert {path.relative_to(PACKAGE).as_posix() for path in using} == allowed, json.dumps(pattern)
