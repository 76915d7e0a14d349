"""Damaged data and caches: each damage is found before the first step, or the batches are unchanged."""

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megamoe.apps.prepare.verify import verify_in_full
from megamoe.config.schema import DataConfig
from megamoe.data import verify
from megamoe.data.card import load_card
from megamoe.data.index_file import HEADER
from megamoe.errors import UserError
from tests.data.test_index_file import parts_of_index
from tests.support.data.sources import build, config, make_bare_data, make_data

NUM_SAMPLES = 24
NUM_DOCUMENTS = 12


def document(number: int) -> str:
    return "".join(chr(33 + (7 * number + place) % 90) for place in range(20 + number))


def blend(folder: Path) -> DataConfig:
    """Two prepared datasets with a validation share, document-aware, so that the cards matter too."""
    paths = [str(folder / name) for name in "ab"]
    return config(*paths, weights=[2.0, 1.0], split=[0.8, 0.2, 0.0], document_aware=True)


def batches(data: DataConfig) -> list[list[object]]:
    datasets = build(data, train=NUM_SAMPLES, validation=4)
    sets = [datasets.train, *datasets.validation.values()]
    return [[item.tolist() for item in one[index].values() if hasattr(item, "tolist")]
            for one in sets for index in range(4 if one is not datasets.train else NUM_SAMPLES)]  # fmt: skip


def flip(path: Path, draw: random.Random, first: int = 0, end: int | None = None) -> None:
    """One to four bytes within a part of the file become others."""
    content = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(first, min(end or len(content), len(content)))
        content[place] ^= draw.randrange(1, 256)
    with open(path, "r+b") as file:  # the inode stays
        file.write(content)


def other_of(path: Path, draw: random.Random) -> Path:
    """A file of the same kind: the other dataset's, or another entry's of the cache."""
    if path.parent.name in ("cache", "verified"):
        return draw.choice([p for p in sorted(path.parent.glob(f"*{path.suffix}")) if p != path])
    return path.with_name(("b" if path.name[0] == "a" else "a") + path.name[1:])


def damage(folder: Path, draw: random.Random) -> str:
    """One damage of one file; returns what it was."""
    cache = [p for p in sorted(folder.glob("cache/**/*")) if p.is_file() and p.suffix in (".npy", ".json")]
    path = draw.choice([folder / "a.idx", folder / "a.bin", folder / "a.card.json", draw.choice(cache)])
    kind = draw.choice(["flip", "flip", "truncate", "swap"])
    if kind == "truncate":
        os.truncate(path, draw.randrange(path.stat().st_size))
    elif kind == "swap":
        other = other_of(path, draw)
        path.rename(folder / "swapped")
        other.rename(path)
        (folder / "swapped").rename(other)
        kind = f"swap with {other.name}"
    elif path.suffix == ".idx":
        part, (first, end) = draw.choice(list(parts_of_index(path).items()))
        flip(path, draw, first, end)
        kind = f"flip in {part}"
    else:
        flip(path, draw)
    return f"{path.name}: {kind}"


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the blend's data, its cache, and facts of its files that hold."""
    # Facts of files that are as young as these would not be kept.
    monkeypatch.setattr(verify, "SETTLED_S", 0.0)
    folder = tmp_path / "data"
    folder.mkdir()
    make_data(folder / "a", [document(number) for number in range(NUM_DOCUMENTS)])
    make_data(folder / "b", [document(number + 3) for number in range(NUM_DOCUMENTS)])
    return folder


def restore(whole: Path, folder: Path) -> None:
    """Only what differs, so that inodes and the facts of the other files stay."""
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        kept = whole / path.relative_to(folder)
        if not kept.exists():
            path.unlink()
        elif kept.read_bytes() != path.read_bytes():
            path.write_bytes(kept.read_bytes())
    for path in [p for p in whole.rglob("*") if p.is_file()]:
        if not (folder / path.relative_to(whole)).exists():
            shutil.copy(path, folder / path.relative_to(whole))


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 260), marks=pytest.mark.full)])
def test_no_damage_changes_the_batches_unseen(prepared: Path, seeds: range, capsys: Any) -> None:
    data = blend(prepared)
    expected = batches(data)
    assert batches(data) == expected
    assert not capsys.readouterr().err  # the cache is used
    whole = prepared.with_name("whole")
    shutil.copytree(prepared, whole)
    reported, remade = set(), 0
    for seed in seeds:
        draw = random.Random(seed)
        what = damage(prepared, draw)
        try:
            found = batches(data)
        except UserError as error:
            assert "\n" not in str(error)
            reported.add(what.split(": ")[0])
        else:
            assert found == expected, f"seed {seed}: {what}"
            remade += "made anew" in capsys.readouterr().err
        restore(whole, prepared)
    assert batches(data) == expected
    # Every kind of file was refused at least once; indices of the cache were made anew.
    assert {"a.idx", "a.bin", "a.card.json"} <= reported and remade >= len(seeds) // 20


def data_of(prefix: Path, tokens: list[int], dtype: type[np.number] = np.int32) -> DataConfig:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    builder.add_document(np.array(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return config(str(prefix), tokenizer="bytes")


def test_a_token_id_past_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    for number, wrong in enumerate((257, -1, 70_000)):
        data = data_of(tmp_path / str(number), [5] * 30 + [wrong] + [5] * 9)
        reported = rf"{number}\.bin': token id {wrong} \(token 30, byte 120\) .*vocabulary of 257"
        for _ in range(2):  # read, then known
            with pytest.raises(UserError, match=reported):
                build(data)
    assert build(data_of(tmp_path / "right", [256] * 40))


def test_data_that_is_verified_is_not_read_again(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []

    def note(path: Path, **options: object) -> dict[str, object]:
        reads.append(path.name)
        return scan(path, **options)  # type: ignore[arg-type]

    scan = verify.scan
    monkeypatch.setattr("megamoe.data.verify.scan", note)
    data = blend(prepared)
    batches(data)
    assert sorted(reads) == ["a.bin", "a.idx", "b.bin", "b.idx"]
    batches(data)
    assert len(reads) == 4
    # Other bytes of the same number, and the times of before: the time of the change stays.
    before = (prepared / "a.bin").stat()
    flip(prepared / "a.bin", random.Random(1))
    os.utime(prepared / "a.bin", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UserError, match=r"a\.bin' is damaged or another dataset's: SHA-256"):
        batches(data)


def test_facts_of_a_file_that_has_just_changed_are_not_kept(prepared: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(verify, "SETTLED_S", 3600.0)
    batches(blend(prepared))
    assert not list(prepared.glob("cache/verified/*"))


def test_structure_alone_leaves_the_tokens_to_the_samples(tmp_path: Path) -> None:
    """`data.verify: structure` does not read the .bin at the start; wrong content is reported when it is
    read.
    """
    data = data_of(tmp_path / "x", [5] * 30 + [300] + [5] * 9)
    data.verify = "structure"
    dataset = build(data).train
    reported = rf"{tmp_path}/x\.bin holds no token id: token 30 of document 0 is 300, the vocabulary has 257"
    with pytest.raises(UserError, match=reported):
        [dataset[index] for index in range(10)]
    card = json.loads(Path(make_data(tmp_path / "y", ["abc" * 9]) + ".card.json").read_text())
    del card["checksum"]
    (tmp_path / "y.card.json").write_text(json.dumps(card | {"largest_token": 300}))
    data = config(str(tmp_path / "y"), verify="structure")
    with pytest.raises(UserError, match=r"y\.bin': token id 300 \(by its card\) is outside"):
        build(data)


def test_a_token_that_changes_during_training_is_reported(tmp_path: Path) -> None:
    dataset: Any = build(data_of(tmp_path / "x", [5] * 50)).train
    assert dataset[0]["tokens"].max() == 5
    with open(tmp_path / "x.bin", "r+b") as file:
        file.write(struct.pack("<50i", *[9999] * 50))
    with pytest.raises(UserError, match=r"x\.bin holds no token id: token 0 of document 0 is 9999"):
        dataset[0]
    with open(tmp_path / "x.idx", "r+b") as file:
        file.seek(HEADER.size + 4)
        file.write(struct.pack("<q", 2**40))
    reported = r"sample 0 of .*x\.bin cannot be read \(.*\); prepare it again"
    dataset._dataset.dataset.index.__getitem__.cache_clear()  # of the last few entries of the .idx
    with pytest.raises(UserError, match=reported):
        dataset[0]


def test_a_card_of_an_earlier_version_is_read_and_its_data_verified(tmp_path: Path) -> None:
    path = Path(make_data(tmp_path / "a", ["abc" * 20]) + ".card.json")
    new = load_card(str(tmp_path / "a"))
    assert new is not None and new.largest_token == 256
    card = json.loads(path.read_text())
    del card["checksum"], card["largest_token"]
    path.write_text(json.dumps(card))
    old = load_card(str(tmp_path / "a"))
    assert old is not None and old.largest_token is None and old.bin == new.bin
    assert build(config(str(tmp_path / "a")))
    for key, wrong, message in (
        ("documents", 2, r"a\.idx' has sequences 1, its card says 2"),
        ("dtype", "int32", r"a\.idx' has tokens of dtype uint16, its card says int32"),
        ("tokens", 60, r"a\.idx' has 61 tokens, its card says 60"),
        ("tokenizer", card["tokenizer"] | {"eod": 97}, r"a' is damaged: .* end of document 97"),
    ):
        path.write_text(json.dumps(card | {key: wrong}))
        with pytest.raises(UserError, match=message):
            build(config(str(tmp_path / "a")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"eod": 256', '"eod": 255'), "does not fit its 'checksum'"),
        (lambda text: text[:-5], "cannot be read"),
        (lambda text: "[" * 100_000, "cannot be read"),
        (lambda text: "null", "broken: "),
        (lambda text: text.replace('"tokens"', '"token"'), "broken: tokens"),
    ],
)
def test_a_damaged_card(tmp_path: Path, change: Callable[[str], str], message: str) -> None:
    path = Path(make_data(tmp_path / "a", ["abc" * 20]) + ".card.json")
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=rf"a\.card\.json' .*{message}"):
        load_card(str(tmp_path / "a"))


def test_a_pickle_in_the_caches_place_does_not_run(prepared: Path, capsys: Any) -> None:
    data = blend(prepared)
    expected = batches(data)
    for path in prepared.glob("cache/*.npy"):
        # What numpy.load(allow_pickle=True) would execute.
        path.write_bytes(b"cos\nsystem\n(S'touch " + str(prepared / "ran").encode() + b"'\ntR.")
    assert batches(data) == expected
    assert not (prepared / "ran").exists()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(list(prepared.glob("cache/*.json")))  # an entry, a line
    assert all(line.startswith("warning: data.cache: ") and line.endswith("made anew") for line in lines)


@pytest.mark.parametrize("of_record", [False, True])
def test_the_index_of_other_data_is_made_anew(tmp_path: Path, capsys: Any, of_record: bool) -> None:
    """The other data has the same name and size, and its index is intact."""
    text = document(5)
    (tmp_path / "other").mkdir()
    data, other = (config(make_data(tmp_path / name, [text] * 4)) for name in ("a", "other/a"))
    expected = [build(data).train[index]["tokens"].tolist() for index in range(5)]
    build(other, seed=2)
    theirs = sorted(p for p in (tmp_path / "other/cache").iterdir() if p.suffix in (".npy", ".json"))
    ours = sorted(p for p in (tmp_path / "cache").iterdir() if p.suffix in (".npy", ".json"))
    for mine, foreign in zip(ours, theirs, strict=True):
        if mine.suffix == ".npy" or of_record:
            shutil.copy(foreign, mine)
    assert [build(data).train[index]["tokens"].tolist() for index in range(5)] == expected
    reported = "belongs to other data" if of_record else "is damaged or another index (its SHA-256 differs)"
    assert reported in capsys.readouterr().err


def test_full_verification_uses_no_cache(prepared: Path, tmp_path: Path) -> None:
    bare = make_bare_data(tmp_path / "bare")
    assert "no card, so no SHA-256" in verify_in_full(bare)
    batches(blend(prepared))  # keeps facts, which the tool does not ask for
    flip(prepared / "a.bin", random.Random(1))
    with pytest.raises(UserError, match=r"a\.bin' is damaged or another dataset's: SHA-256"):
        verify_in_full(str(prepared / "a"))
