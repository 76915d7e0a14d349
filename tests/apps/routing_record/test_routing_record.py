"""Files of a routing record: any number of experts a token, checksums, torn ends, folders of other runs."""

from pathlib import Path

import pytest
import torch

from megamoe.apps.routing_record.record import (
    Rows,
    begin_record,
    check_folder,
    file_name,
    last_whole_step,
    read_rows,
    write_rows,
)
from megamoe.errors import UserError

META = {"moe.layers": [1], "moe.num_experts": 300, "seed": 1}
FIRST = {40: [7], 8: [299, 0, 3], 9: [], 41: [1, 1], 1 << 50: [5]}
SECOND = {10: [4], 42: [2, 3]}


def rows_of(choices: dict[int, list[int]]) -> Rows:
    """Rows of tokens in the order given."""
    flat = [expert for row in choices.values() for expert in row]
    counts = [len(row) for row in choices.values()]
    return Rows.of(torch.tensor(list(choices)), torch.tensor(counts), torch.tensor(flat, dtype=torch.int64))


def found_in(rows: Rows, tokens: list[int]) -> list[list[int]] | None:
    place_T = rows.find(torch.tensor(tokens))
    if place_T is None:
        return None
    expert_TK, count_T = rows.choices(place_T)
    return [row[:size] for row, size in zip(expert_TK.tolist(), count_T.tolist(), strict=True)]


def test_what_is_written_is_read_by_token(tmp_path: Path) -> None:
    for rank, choices in enumerate((FIRST, SECOND)):
        other = rows_of({token: [rank] for token in choices})
        write_rows(
            tmp_path / file_name(3, "train", rank), {0: rows_of(choices), 1: other}, [300, 300], ranks=2
        )
    one, two = read_rows(tmp_path, 3, "train", 2)
    both = {**FIRST, **SECOND}
    for tokens in ([8, 9, 10], [42, 41, 40], [9], list(both)):
        assert found_in(one, tokens) == [both[token] for token in tokens]
        assert found_in(two, tokens) == [[int(token in SECOND)] for token in tokens]
    assert found_in(one, [8, 11]) is None and found_in(one, [43]) is None
    with pytest.raises(ValueError, match="No such file"):
        read_rows(tmp_path, 3, "val", 2)
    with pytest.raises(ValueError, match="unexpected tensors"):
        read_rows(tmp_path, 3, "train", 3)


def test_files_of_stages_have_the_layers_of_their_stages(tmp_path: Path) -> None:
    """Two data-parallel ranks of three stages, the second of which has no MoE layer."""
    for rank, choices in enumerate((FIRST, SECOND)):
        for stage, place in enumerate((0, None, 1)):
            layers = {} if place is None else {place: rows_of(choices)}
            write_rows(tmp_path / file_name(3, "train", 2 * stage + rank), layers, [300, 300, 300], ranks=6)
    for rows in read_rows(tmp_path, 3, "train", 2):
        assert found_in(rows, [8, 42, 9]) == [FIRST[8], SECOND[42], []]


def test_names_of_validation_sets_stay_in_the_folder() -> None:
    name = file_name(1, "val/../a b", 0)
    assert "/" not in name and name.startswith("step_00000001.val%2F..%2Fa%20b.")


def record(folder: Path, steps: int) -> None:
    begin_record(folder, META, 0)
    for step in range(1, steps + 1):
        write_rows(folder / file_name(step, "train", 0), {0: rows_of(FIRST)}, [300], ranks=1)


def test_a_torn_end_is_told_with_the_last_whole_step(tmp_path: Path) -> None:
    record(tmp_path, 3)
    assert last_whole_step(tmp_path, 1) == (3, "it is not in the record")
    path = tmp_path / file_name(3, "train", 0)
    content = path.read_bytes()
    changed = content[:-1] + bytes([content[-1] ^ 1])
    for torn in (content[:-9], b"", changed, bytes(len(content))):
        path.write_bytes(torn)
        expected = f"{path.name} is torn or was changed: its checksum does not match"
        assert last_whole_step(tmp_path, 1) == (2, expected)
    path.unlink()
    assert last_whole_step(tmp_path, 1) == (2, "it is not in the record")


def test_going_on_removes_the_later_steps_alone(tmp_path: Path) -> None:
    record(tmp_path, 3)
    (tmp_path / "notes.txt").touch()
    begin_record(tmp_path, META, 2)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["notes.txt", "routing.json", file_name(1, "train", 0), file_name(2, "train", 0)]


def test_a_record_of_another_run_is_one_line(tmp_path: Path) -> None:
    assert not check_folder("key", tmp_path / "none", META)
    assert not check_folder("key", tmp_path, META)
    record(tmp_path, 1)
    assert check_folder("key", tmp_path, META)
    with pytest.raises(UserError) as caught:
        check_folder("key", tmp_path, {**META, "seed": 2})
    expected = (
        f"key: {tmp_path} is a record of seed 1, this run has 2; name a record of the same model and data"
    )
    assert str(caught.value) == expected
    decoder = {**META, "model.architecture": "decoder", "train.objective": {"name": "causal"}}
    assert check_folder("key", tmp_path, decoder)  # a record from before these keys
    with pytest.raises(UserError, match='record of model.architecture "decoder", this run has "encoder"'):
        check_folder("key", tmp_path, {**decoder, "model.architecture": "encoder"})
    for text in ("", "[1]", "[" * 100_000):
        (tmp_path / "routing.json").write_text(text)
        with pytest.raises(UserError, match="expected the description of a record"):
            check_folder("key", tmp_path, META)


def test_a_file_is_compact(tmp_path: Path) -> None:
    """Two experts of 8 cost three bytes a token and layer, beside a constant."""
    sizes = []
    for tokens in (1000, 3000):
        rows = rows_of({token: [token % 8, 1] for token in range(tokens)})
        write_rows(tmp_path / "a", {0: rows, 1: rows}, [8, 8], ranks=1)
        sizes.append((tmp_path / "a").stat().st_size)
    assert abs(sizes[1] - sizes[0] - 2000 * 2 * 3) < 64
