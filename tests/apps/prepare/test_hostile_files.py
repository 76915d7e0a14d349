"""Damaged and hostile input: one line that names the file, whatever libraries do, and nothing is written."""

import gzip
import json
import lzma
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import zstandard

from megamoe.apps.prepare import command, tables
from megamoe.apps.prepare.prepare import Preparation, prepare
from megamoe.errors import LONGEST_LINE, UserError

pyarrow = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
parquet = pytest.importorskip("pyarrow.parquet")
PACK: dict[str, Any] = {"gz": gzip.compress, "zst": zstandard.compress, "xz": lzma.compress}


def refused(folder: Path, *inputs: Path, **options: Any) -> str:
    """Return the line that a preparation ends with, and check that nothing is left."""
    with pytest.raises(UserError) as caught:
        prepared(folder, *inputs, **options)
    line = str(caught.value)
    assert line.isprintable() and len(line) <= LONGEST_LINE and not list(folder.glob("*output*"))
    return line


def prepared(folder: Path, *inputs: Path, **options: Any) -> int:
    names = [str(path) for path in inputs]
    return prepare(Preparation(str(folder / "output"), names, progress=False, **options)).documents


def written(folder: Path, kind: str, texts: list[str]) -> Path:
    """Write texts to a file of a kind, and return its path."""
    endings = {packed: f"jsonl.{packed}" for packed in PACK}
    path = folder / f"in.{endings.get(kind, kind)}"
    if kind == "parquet":
        parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=20)
    elif kind == "txt":
        path.write_bytes(texts[0].encode())
    else:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        path.write_bytes(PACK.get(kind, bytes)(lines.encode()))
    return path


def test_a_crash_of_the_library_is_one_line_and_the_next_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "parquet", ["text"] * 60)
    process, connection = tables._process()
    process.send_signal(signal.SIGSEGV)
    with monkeypatch.context() as patch:
        patch.setattr(tables, "_process", lambda: (process, connection))
        line = refused(tmp_path, path)
    assert "in.parquet: cannot be read: pyarrow ended with SIGSEGV" in line
    assert prepared(tmp_path, path) == 60


def test_columns_of_one_name(tmp_path: Path) -> None:
    double = pyarrow.table([["a"], ["b"], ["c"]], names=["text", "text", "\x1b[31m" + "x" * 5000])
    parquet.write_table(double, tmp_path / "in.parquet")
    line = refused(tmp_path, tmp_path / "in.parquet")
    assert "in.parquet: 2 columns 'text'" in line and r"\x1b[31mxxx" in line


def test_a_dictionary_bomb_takes_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 rows of a MiB each in a small file: a gigabyte if they were unpacked at once."""
    words = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000, "int32"), ["x" * (1 << 20)])
    table = pyarrow.table({"text": words})
    options = {"dictionary_pagesize_limit": 1 << 30, "store_schema": False, "write_statistics": False}
    parquet.write_table(table, tmp_path / "in.parquet", **options)
    monkeypatch.setattr(tables, "_idle", [])
    monkeypatch.setattr(tables, "LARGEST_PROCESS", 1 << 29)
    line = refused(tmp_path, tmp_path / "in.parquet", max_documents=3)
    assert "in.parquet: row group 0: cannot be read: it needs too much memory" in line


@pytest.mark.parametrize("kind", ["txt", "jsonl", "gz", "zst", "xz", "parquet"])
def test_texts_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    for module in ("documents", "sources"):
        monkeypatch.setattr(f"megamoe.apps.prepare.{module}.LARGEST_DOCUMENT", 1000)
    path = written(tmp_path, kind, ["x" * 2000])
    assert "a document of more than 1,000 bytes" in refused(tmp_path, path)


@pytest.mark.parametrize("kind", PACK)
def test_what_follows_a_packed_stream_is_read_or_refused(tmp_path: Path, kind: str) -> None:
    """Python's reader of xz takes a damaged second stream for the end."""
    path, pack = tmp_path / f"in.jsonl.{kind}", PACK[kind]
    path.write_bytes(pack(b'{"text": "a"}\n') + b"\x01" + pack(b'{"text": "b"}\n')[1:])
    assert "cannot be read" in refused(tmp_path, path)


def test_xz_that_needs_much_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megamoe.apps.prepare.decompression.XZ_BYTES", 1 << 16)
    (tmp_path / "in.txt.xz").write_bytes(lzma.compress(b"a"))
    assert "Memory usage limit" in refused(tmp_path, tmp_path / "in.txt.xz")


def test_ids_of_any_size(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"ids": [1, 10**30]}))
    line = refused(tmp_path, tmp_path / "in.jsonl", ids_column="ids")
    assert "in.jsonl:1: a token id has more than 64 bits" in line


def test_names_reach_the_terminal_as_one_short_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ("\x1b[31m" + "n" * 200 + os.fsdecode(b"\xff") + "\n.jsonl")
    path.write_text(json.dumps({"\x1b[2J" + "k" * 100_000: 1}))
    assert command.main([str(tmp_path), "--tokenizer=bytes", f"--output={tmp_path / 'out'}"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.isprintable() and len(line) <= LONGEST_LINE + 10
    assert r"\x1b[31mnnn" in line and r"\x1b[2Jkkk" in line and line.endswith("--bad-lines skip")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["parquet", "xz", "zst", "gz"])
def test_damaged_bytes_are_read_or_one_line(tmp_path: Path, kind: str) -> None:
    """A flipped bit, or a cut file: every outcome but a traceback or a crash of this process."""
    path = written(tmp_path, kind, [f"text {n} " * 5 for n in range(60)])
    whole, draws = path.read_bytes(), random.Random(1)
    for number in range(60):
        place = draws.randrange(1, len(whole))
        flipped = whole[:place] + bytes([whole[place] ^ 1 << draws.randrange(8)]) + whole[place + 1 :]
        path.write_bytes(flipped if number % 3 else whole[:place])
        try:
            prepared(tmp_path, path, overwrite=True)
        except UserError as error:
            assert path.name in str(error) and str(error).isprintable() and len(str(error)) <= LONGEST_LINE
        else:
            assert number % 3, "a cut file"
