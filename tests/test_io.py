"""Files that are put in place in one move: whole, or as they were."""

import os
from pathlib import Path

import pytest

from megamoe.io import replacing


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
