"""The .idx file: which entry is wrong, and no memory for what a header or an entry claims."""

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megamoe.data import index_file, verify
from megamoe.data.datasets import resolve_vocabulary
from megamoe.data.index_file import HEADER, MAGIC, check_arithmetic, read_header
from megamoe.errors import UserError
from tests.support.data.sources import config, make_bare_data


def parts_of_index(idx: Path) -> dict[str, tuple[int, int]]:
    header, _ = read_header(idx)
    return {
        "header": (0, HEADER.size),
        "lengths": (HEADER.size, header.pointers_at),
        "pointers": (header.pointers_at, header.boundaries_at),
        "documents": (header.boundaries_at, header.file_size),
    }


def test_every_part_of_an_index_without_a_card_is_verified(tmp_path: Path) -> None:
    """Data of Megatron-LM's own preprocessing: no hash, the arithmetic alone."""
    path = Path(make_bare_data(tmp_path / "bare") + ".idx")
    whole = path.read_bytes()
    parts = parts_of_index(path)
    size = path.with_suffix(".bin").stat().st_size
    for part in ("lengths", "pointers", "documents"):
        for place in range(*parts[part]):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x81]) + whole[place + 1 :])
            with pytest.raises(UserError, match=r"bare\.idx' is damaged: "):
                check_arithmetic(path, size)
    path.write_bytes(whole)
    header, tokens = check_arithmetic(path, size)
    assert (header.dtype, header.num_sequences, tokens) == ("int32", 2, 60)


@pytest.mark.parametrize(
    ("lengths", "pointers", "boundaries", "message"),
    [
        ([3, -1, 3], [0, 6, 4], [0, 3], "sequence 1 has length -1"),
        ([3, 1, 1], [0, 8, 10], [0, 3], "sequence 1 begins at byte 8, expected 6"),
        ([3, 1, 1], [0, 6, -8], [0, 3], "sequence 2 begins at byte -8, expected 8"),
        ([2, 1, 2], [2, 6, 8], [0, 3], "sequence 0 begins at byte 2, expected 0"),
        ([3, 9, 1], [0, 6, 24], [0, 3], "sequence 1 ends after the .bin's 10 bytes"),
        ([3, 1, 0], [0, 6, 8], [0, 3], "end at byte 8, the .bin has 10"),
        ([3, 1, 1], [0, 6, 8], [1, 3], "first document begins at sequence 1"),
        ([3, 1, 1], [0, 6, 8], [0, 2, 1, 3], "do not ascend"),
        ([3, 1, 1], [0, 6, 8], [0, 2], "last document ends at sequence 2, there are 3"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 2, 1000])
def test_an_index_says_which_entry_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int,
    lengths: list[int], pointers: list[int], boundaries: list[int], message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(index_file, "CHUNK", chunk)
    idx = tmp_path / "x.idx"
    write_index(idx, lengths, pointers, boundaries)
    with pytest.raises(UserError, match=rf"x\.idx' is damaged: .*{message}"):
        check_arithmetic(idx, 10)


def write_index(idx: Path, lengths: list[int], pointers: list[int], boundaries: list[int]) -> None:
    numbers = [np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(boundaries, "<i8")]
    head = HEADER.pack(MAGIC, 1, 8, len(lengths), len(boundaries))
    idx.write_bytes(head + b"".join(array.tobytes() for array in numbers))


def test_sequences_and_documents_may_be_empty(tmp_path: Path) -> None:
    write_index(tmp_path / "x.idx", [0, 3, 0, 2], [0, 0, 6, 6], [0, 1, 1, 4])
    assert check_arithmetic(tmp_path / "x.idx", 10)[1] == 5


@pytest.mark.parametrize("count", [2**60, 2**63, 2**64 - 1, 2**31])
def test_a_hostile_number_in_a_header_takes_no_memory(tmp_path: Path, count: int) -> None:
    path = Path(make_bare_data(tmp_path / "bare") + ".idx")
    content = path.read_bytes()
    tracemalloc.start()
    for place in (18, 26):  # of the number of sequences, of document boundaries
        path.write_bytes(content[:place] + struct.pack("<Q", count) + content[place + 8 :])
        with pytest.raises(UserError, match=r"bare\.idx' is truncated"):
            resolve_vocabulary(config(str(path)[:-4]), 500)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_memory_does_not_grow_with_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_file, "CHUNK", 2**10)
    monkeypatch.setattr(verify, "CHUNK_BYTES", 2**16)
    idx, count = tmp_path / "x.idx", 2**17
    lengths = [1] * count
    write_index(idx, lengths, list(range(0, 2 * count, 2)), [0, count])
    tracemalloc.start()
    assert check_arithmetic(idx, 2 * count)[1] == count
    assert verify.scan(idx, dtype="uint16")["uint16"][0] == 0
    assert tracemalloc.get_traced_memory()[1] < idx.stat().st_size // 4
    tracemalloc.stop()
