"""Data files that change while they are read: an error that names them, before the kernel kills."""

import os
from pathlib import Path

import pytest

from megamoe.data.mapped_files import CheckedDataset
from megamoe.errors import UserError
from tests.support.data.sources import build, config, make_data, stream


def blend(folder: Path) -> CheckedDataset:
    """Return a blend of two sources of one letter each, with cached indices."""
    paths = [make_data(folder / name, [name * 200]) for name in ("a", "b")]
    dataset = build(config(*paths), train=40).train
    assert isinstance(dataset, CheckedDataset)
    return dataset


def first_of(dataset: CheckedDataset, letter: str) -> int:
    return next(i for i in range(len(dataset)) if int(dataset[i]["tokens"][0]) == ord(letter))


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_file_that_shrinks_is_named_by_the_samples_that_need_it(tmp_path: Path, ending: str) -> None:
    dataset = blend(tmp_path)
    of_a, of_b = first_of(dataset, "a"), first_of(dataset, "b")
    file = tmp_path / f"b{ending}"
    size = file.stat().st_size
    os.truncate(file, 0)
    message = rf"data: {file} had {size} bytes and now has 0; prepare it again .* go on with --resume"
    with pytest.raises(UserError, match=message):
        dataset[of_b]
    assert chr(int(dataset[of_a]["tokens"][0])) == "a"


def test_a_cached_index_that_shrinks_is_named(tmp_path: Path) -> None:
    blend(tmp_path)
    dataset = blend(tmp_path)  # which maps what the first has written
    for file in (tmp_path / "cache").glob("*shuffle_index.npy"):
        os.truncate(file, 0)
    with pytest.raises(UserError, match=r"shuffle_index\.npy had \d+ bytes and now has 0"):
        dataset[0]


def test_a_replaced_or_removed_file_is_still_readable(tmp_path: Path) -> None:
    dataset = blend(tmp_path)
    of_b, before = first_of(dataset, "b"), [dataset[i]["tokens"].tolist() for i in range(10)]
    (tmp_path / "a.bin").unlink()
    (tmp_path / "new").write_bytes(b"short")
    os.replace(tmp_path / "new", tmp_path / "b.bin")
    assert [dataset[i]["tokens"].tolist() for i in range(10)] == before
    assert chr(int(dataset[of_b]["tokens"][0])) == "b"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_reports_it_in_one_line(tmp_path: Path, workers: int) -> None:
    """It is not the traceback of a loader process."""
    dataset = build(config(make_data(tmp_path / "a", ["x" * 2000])), train=200).train
    with stream(dataset, 1, workers=workers) as batches:
        next(batches)
        os.truncate(tmp_path / "a.bin", 10)
        with pytest.raises(UserError) as message:
            for _ in range(100):
                next(batches)
    assert str(message.value).startswith(f"data: {tmp_path}/a.bin had ") and "\n" not in str(message.value)
