"""Where documents come from: tables, packed lines, URLs, ready tokens; what is left out is counted."""

import codecs
import gzip
import hashlib
import json
import lzma
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megamoe import object_storage
from megamoe.apps.prepare import prepare as prepare_module
from megamoe.apps.prepare import remote
from megamoe.apps.prepare.sources import Source, Tap, find_sources
from megamoe.errors import UserError
from tests.support.data.sources import documents_of, prepared

pyarrow = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
parquet = pytest.importorskip("pyarrow.parquet")
EOD = 256


def table(number: int = 40) -> Any:
    """Rows of which some have no text, and some are blank."""
    texts = [None if n % 10 == 3 else " " if n % 10 == 7 else f"né {n} " * (n + 1) for n in range(number)]
    return pyarrow.table(
        {
            "text": texts,
            "language": ["en" if n % 2 else "de" for n in range(number)],
            "score": [None if n % 5 == 0 else n / number for n in range(number)],
            "ids": [list(range(n % 4)) + [EOD] * (n % 2) for n in range(number)],
        }
    )


def texts() -> list[str]:
    return [text for text in table().to_pydict()["text"] if (text or "").strip()]


@pytest.mark.parametrize("is_dictionary", [False, True])
def test_tables(tmp_path: Path, is_dictionary: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megamoe.apps.prepare.tables.MOST_ROWS", 3)
    rows = table()
    path = tmp_path / "in.parquet"
    if is_dictionary:
        rows = rows.set_column(0, "text", rows["text"].dictionary_encode())
    parquet.write_table(rows, path, row_group_size=9)
    card = prepared(tmp_path / "out", path)
    expected = texts()
    assert documents_of(tmp_path / "out") == expected
    assert (card.documents, card.empty_documents, card.skipped) == (32, 4, {"null": 4})
    assert card.text_bytes == sum(len(text.encode()) for text in expected)
    # The hash is of the rows' texts with their lengths, the blank ones included.
    digest = hashlib.sha256()
    for text in filter(None, table().to_pydict()["text"]):
        digest.update(len(text.encode()).to_bytes(8, "little") + text.encode())
    assert card.sources[0].sha256 == digest.hexdigest()


def test_row_groups_are_the_units_of_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet.write_table(table(400), tmp_path / "in.parquet", row_group_size=9)
    prepared(tmp_path / "whole", tmp_path / "in.parquet")
    monkeypatch.setattr(prepare_module, "PART_BYTES", 2000)
    units = find_sources([str(tmp_path / "in.parquet")], False, 2000)
    bounds = [groups for unit in units if (groups := unit.groups)]
    assert len(units) > 5 and [it[0] for it in bounds[1:]] == [it[1] for it in bounds[:-1]]
    card = prepared(tmp_path / "parts", tmp_path / "in.parquet")
    assert documents_of(tmp_path / "parts") == documents_of(tmp_path / "whole")
    assert [source.name for source in card.sources] == [unit.name for unit in units]
    for ending in (".bin", ".idx", ".counts.npy"):
        assert (tmp_path / f"parts{ending}").read_bytes() == (tmp_path / f"whole{ending}").read_bytes()


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_ready_tokens(tmp_path: Path, kind: str) -> None:
    rows = table()
    path = tmp_path / f"in.{kind}"
    if kind == "parquet":
        parquet.write_table(rows, path)
    else:
        path.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in rows.to_pydict()["ids"]))
    card = prepared(tmp_path / "out", path, ids_column="ids")
    indexed = IndexedDataset(str(tmp_path / "out"))
    assert [indexed[n].tolist() for n in range(len(indexed))] == [
        [*range(n % 4), EOD] for n in range(40) if n % 4
    ]
    assert (card.documents, card.empty_documents, card.text_bytes) == (30, 10, 0)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 257], "token id 257 is outside"),
        ([-1], "token id -1 is outside"),
        ([1, EOD, 2], "inside of a document"),
    ],
)
def test_tokens_that_do_not_fit(tmp_path: Path, ids: list[int], message: str) -> None:
    parquet.write_table(pyarrow.table({"ids": [[1], ids]}), tmp_path / "in.parquet")
    (tmp_path / "in.jsonl").write_text(json.dumps({"ids": ids}))
    for name, place in (("in.parquet", "row group 0"), ("in.jsonl", "1")):
        with pytest.raises(UserError, match=rf"{name}: ?{place}: .*{message}"):
            prepared(tmp_path / "out", tmp_path / name, ids_column="ids")
    assert not list(tmp_path.glob("*out*"))


def test_json_lines_under_the_ending_of_megatron(tmp_path: Path) -> None:
    """Other files of this ending, such as those of source code, are texts."""
    lines = "".join(json.dumps({"text": f"text {n}", "id": n}) + "\n" for n in range(3))
    (tmp_path / "loose.json.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "package.json").write_text(package := '{\n "text": "x"\n}\n')
    (tmp_path / "other.json").write_text(other := '{"name": "x"}\n')
    expected = {"loose": ["text 0", "text 1", "text 2"], "package": [package], "other": [other]}
    for path in sorted(tmp_path.iterdir()):
        prepared(tmp_path / "out", path, overwrite=True)
        assert documents_of(tmp_path / "out") == expected[path.name.partition(".")[0]]


def test_a_byte_order_mark_at_the_start_of_a_file_is_no_text(tmp_path: Path) -> None:
    mark = codecs.BOM_UTF8
    (tmp_path / "1.txt").write_bytes(mark + "one \ufeff".encode())
    (tmp_path / "2.jsonl").write_bytes(mark + b'{"text": "two"}\n\n{"text": "three"}\n')
    (tmp_path / "3.jsonl").write_bytes(mark + b'\n{"text": "four"}\n')
    (tmp_path / "4.txt").write_bytes(mark)
    card = prepared(tmp_path / "out", *sorted(tmp_path.iterdir()))
    assert documents_of(tmp_path / "out") == ["one \ufeff", "two", "three", "four"]
    assert card.empty_documents == 1
    source = Source("2.jsonl", tmp_path / "2.jsonl")
    with closing(Tap(source)) as tap:
        assert next(tap.lines()) == '{"text": "two"}'


def test_lines_packed_by_xz(tmp_path: Path) -> None:
    content = b'{"text": "a"}\n{"text": "b"}\n'
    (tmp_path / "in.jsonl.xz").write_bytes(lzma.compress(content[:14]) + lzma.compress(content[14:]))
    prepared(tmp_path / "out", tmp_path / "in.jsonl.xz")
    assert documents_of(tmp_path / "out") == ["a", "b"]
    (tmp_path / "in.jsonl.xz").write_bytes(lzma.compress(content)[:-9])
    with pytest.raises(UserError, match="cannot be read"):
        prepared(tmp_path / "none", tmp_path / "in.jsonl.xz")


def test_urls_give_what_files_give(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    parquet.write_table(table(), tmp_path / "in/a.parquet", row_group_size=9)
    (tmp_path / "in/b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "line"}\n'))
    here = prepared(tmp_path / "here", tmp_path / "in")
    for url in (f"file://{tmp_path}/in", f"file://{tmp_path}/in/*"):
        card = prepared(tmp_path / "there", url, overwrite=True)
        assert (tmp_path / "there.bin").read_bytes() == (tmp_path / "here.bin").read_bytes()
        found = [(source.size, source.sha256, source.documents) for source in card.sources]
        assert found == [(source.size, source.sha256, source.documents) for source in here.sources]
        assert all("://" in source.name for source in card.sources)


def test_bad_urls_are_one_line_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    secret = "sesame-open-42"
    monkeypatch.setattr(MemoryFileSystem, "store", {"/x/a.txt": None})

    def fails(error: Exception) -> Callable[..., Any]:
        def ls(*_: object, **__: object) -> None:
            raise error

        return ls

    for url, error, message in (
        (f"s3://user:{secret}@bucket/a.txt", None, "holds credentials"),
        ("nowhere://bucket/a.txt", None, "unknown scheme nowhere://"),
        ("memory://x/none/*.txt", None, "holds no files"),
        (f"memory://x/a.txt?token={secret}", None, "holds credentials"),
        ("memory://x/a.txt", PermissionError(f"denied {secret}"), "credentials are missing"),
        ("memory://x/a", RuntimeError(f"memory://x/a?sig={secret}\nno"), "cannot be reached"),
    ):  # fmt: skip
        if error:
            monkeypatch.setattr(MemoryFileSystem, "info", fails(error))
            monkeypatch.setattr(MemoryFileSystem, "isfile", fails(error))
            monkeypatch.setattr(MemoryFileSystem, "glob", fails(error))
        with pytest.raises(UserError, match=message) as caught:
            prepared(tmp_path / "out", url)
        assert "\n" not in str(caught.value) and secret not in str(caught.value)
    monkeypatch.setitem(object_storage.PACKAGES, "s3", "s3fs")
    monkeypatch.setattr(remote, "opened", fails(ImportError("Install s3fs")))
    with pytest.raises(UserError, match="s3:// needs the package s3fs"):
        prepared(tmp_path / "out", "s3://bucket/a.txt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": "body"}, r"no column 'body' \(it has text, language, score, ids\); give --key"),
        ({"key": "score"}, "column 'score' holds double, expected text; give --key"),
        ({"ids_column": "text"}, "expected lists of whole numbers; give --ids-column"),
    ],
)
def test_columns_that_do_not_fit(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    parquet.write_table(table(), tmp_path / "in.parquet")
    with pytest.raises(UserError, match=message) as caught:
        prepared(tmp_path / "out", tmp_path / "in.parquet", **options)
    assert "\n" not in str(caught.value) and not list(tmp_path.glob("*out*"))


def test_options_of_tables_are_refused_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match="--ids-column is for"):
        prepared(tmp_path / "out", tmp_path / "a.txt", ids_column="a")
    with pytest.raises(UserError, match="name the tokenizer that made them"):
        prepared(tmp_path / "out", tmp_path / "a.txt", ids_column="a", tokenizer="train")


def test_damaged_tables(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    parquet.write_table(table(), path, row_group_size=9, compression="zstd", use_dictionary=False)
    whole = path.read_bytes()
    start = parquet.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    path.write_bytes(whole[: start + 20] + bytes(60) + whole[start + 80 :])
    with pytest.raises(UserError, match=r"in\.parquet: row group 2: cannot be read: ") as caught:
        prepared(tmp_path / "out", path)
    assert "\n" not in str(caught.value)
    path.write_bytes(whole[:-20])
    with pytest.raises(UserError, match=r"in\.parquet: cannot be read: ") as caught:
        prepared(tmp_path / "out", path)
    assert not list(tmp_path.glob("*out*"))
