"""Indexed data to samples: file checks, splits, blends, document boundaries, the cache, mock."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

import megamoe.data.datasets
from megamoe.config.schema import DataConfig, SourceConfig
from megamoe.data.batches import document_items
from megamoe.data.card import load_card
from megamoe.data.datasets import resolve_vocabulary
from megamoe.errors import UserError
from tests.support.data.sources import EOD, build, config, letters, make_bare_data, make_data


def test_broken_files(tmp_path: Path) -> None:
    path = make_data(tmp_path / "a", ["x" * 50, "y" * 50])
    bare = make_bare_data(tmp_path / "bare")
    assert resolve_vocabulary(config(path, bare), None).size == 257
    for prefix in (path, bare):
        for ending in (".bin", ".idx"):
            content = Path(prefix + ending).read_bytes()
            for broken, message in (
                (content[:-2], "truncated"),
                (content + b"\0", "too long"),
                (b"", "truncated"),
                (None, "no file"),
            ):
                if broken is None:
                    Path(prefix + ending).unlink()
                else:
                    Path(prefix + ending).write_bytes(broken)
                with pytest.raises(UserError, match=message):
                    resolve_vocabulary(config(prefix, tokenizer="bytes"), None)
            Path(prefix + ending).write_bytes(content)
    # Files that fit each other, but are not those of the card.
    longer = make_data(tmp_path / "b", ["x" * 50] * 3)
    for ending in (".bin", ".idx"):
        Path(longer + ending).rename(path + ending)
    with pytest.raises(UserError, match=r"a\.bin.* too long"):
        resolve_vocabulary(config(path), None)
    Path(bare + ".idx").write_bytes(b"NOTINDEX" + Path(bare + ".idx").read_bytes()[8:])
    with pytest.raises(UserError, match="no Megatron-Core index"):
        resolve_vocabulary(config(bare, tokenizer="bytes"), None)


def test_empty_data(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "none.bin"), dtype=np.int32)
    builder.finalize(str(tmp_path / "none.idx"))
    with pytest.raises(UserError, match="empty"):
        resolve_vocabulary(config(str(tmp_path / "none")), 10)
    with pytest.raises(UserError, match=r"data\.sources is empty"):
        resolve_vocabulary(config(), None)
    with pytest.raises(UserError, match=r"data\.validation\.v is empty"):
        resolve_vocabulary(config("x", validation={"v": []}), None)


def test_samples_are_the_text_shifted_by_one(tmp_path: Path) -> None:
    text = "".join(chr(33 + place) for place in range(64))
    data = config(make_data(tmp_path / "a", [text]))
    dataset = build(data, train=8).train
    # 65 tokens with the eod make exactly 8 samples of 8 tokens and their labels: each is met once.
    starts = []
    for index in range(8):
        item = dataset[index]
        assert torch.equal(item["tokens"][1:], item["labels"][:-1])
        assert item["position_ids"].tolist() == list(range(8)) and item["loss_mask"].tolist() == [1.0] * 8
        assert "attention_mask" not in item and "document_start" not in item
        assert (item["tokens"].dtype, item["loss_mask"].dtype) == (torch.int64, torch.float32)
        starts.append(int(item["tokens"][0]) - 33)
    assert sorted(starts) == list(range(0, 64, 8)) and starts != sorted(starts)
    again = build(data, train=8).train
    assert [int(again[index]["tokens"][0]) - 33 for index in range(8)] == starts
    other = build(data, train=8, seed=2).train
    assert [int(other[index]["tokens"][0]) - 33 for index in range(8)] != starts


def test_document_boundaries_by_hand(tmp_path: Path) -> None:
    # One document order is left to chance, so all are alike: "ab" EOD "ab" EOD ...
    data = config(make_data(tmp_path / "a", ["ab"] * 6), document_aware=True, sequence_length=5)
    items = [build(data, train=3).train[index] for index in range(3)]
    item = next(item for item in items if int(item["tokens"][0]) == ord("a"))
    assert item["tokens"].tolist() == [97, 98, EOD, 97, 98]
    assert item["labels"].tolist() == [98, EOD, 97, 98, EOD]
    assert item["position_ids"].tolist() == [0, 1, 2, 0, 1]
    # What follows an end is another document's first token: no loss on it.
    assert item["loss_mask"].tolist() == [1, 1, 0, 1, 1]
    assert item["document_start"].dtype == torch.int32
    assert item["document_start"].tolist() == [0, 0, 0, 3, 3]
    assert "attention_mask" not in item


def test_blend_follows_the_weights(tmp_path: Path) -> None:
    paths = [make_data(tmp_path / letter, [letter * 500] * 4) for letter in "abc"]
    dataset = build(config(*paths, weights=[5.0, 3.0, 2.0]), train=200).train
    counts = letters(dataset, 200)
    # The greedy blend keeps every source within one of its share; a sample may begin at an eod.
    for letter, share in (("a", 100), ("b", 60), ("c", 40)):
        assert abs(counts[letter] - share) <= 4, counts
    first = letters(dataset, 20)
    assert abs(first["a"] - 10) <= 2 and abs(first["b"] - 6) <= 2


def test_blend_with_a_tiny_share_of_tiny_data(tmp_path: Path) -> None:
    paths = [make_data(tmp_path / letter, [letter * 9]) for letter in "abcdef"]
    dataset = build(config(*paths, weights=[95.0, 1, 1, 1, 1, 1]), train=11).train
    assert len(dataset) >= 11  # type: ignore[arg-type]
    assert all(dataset[index]["tokens"].shape == (8,) for index in range(11))


def test_the_order_of_a_blend_does_not_depend_on_the_other_split(tmp_path: Path) -> None:
    """tools/evaluate.py builds one training sample, and a resumed run may have another evaluation.batches."""
    texts = ["".join(map(chr, range(30, 110))), "".join(map(chr, range(110, 190)))]
    paths = [make_data(tmp_path / str(number), [text] * 20) for number, text in enumerate(texts)]
    data = config(*paths, weights=[1.0, 1.0], split=[0.75, 0.25, 0])

    def samples(train: int, validation: int) -> tuple[list[list[int]], list[list[int]]]:
        built = build(data, train, validation)
        return tuple(  # type: ignore[return-value]
            [dataset[index]["tokens"].tolist() for index in range(min(size, 64))]
            for dataset, size in ((built.train, train), (built.validation["valid"], validation))
        )

    train, valid = samples(320, 64)
    for other in (2, 4, 8, 90):  # Megatron-Core's one surplus for all: 1 to 2 for the smallest
        assert samples(320, other)[0] == train
    assert samples(1, 64)[1] == valid


def test_split_is_by_document_and_disjoint(tmp_path: Path) -> None:
    path = make_data(tmp_path / "a", ["t" * 40] * 8 + ["v" * 40] * 2)
    datasets = build(config(path, split=[0.8, 0.2, 0.0]), train=30, validation=6)
    assert list(datasets.validation) == ["valid"]
    seen = {int(token) for index in range(30) for token in datasets.train[index]["tokens"]}
    assert seen == {ord("t"), EOD}
    valid = {int(token) for index in range(6) for token in datasets.validation["valid"][index]["tokens"]}
    assert ord("v") in valid and valid <= {ord("v"), EOD}


def test_named_validation_sets_are_whole_and_blended(tmp_path: Path) -> None:
    paths = {letter: make_data(tmp_path / letter, [letter * 60] * 4) for letter in "abc"}
    blend = [SourceConfig(paths["b"], 1.0), SourceConfig(paths["c"], 3.0)]
    sets = {"one": [SourceConfig(paths["b"])], "two": blend}
    datasets = build(config(paths["a"], validation=sets), train=5, validation=20)
    assert list(datasets.validation) == ["one", "two"]
    assert set(letters(datasets.train, 5)) <= {"a", chr(EOD)}
    assert set(letters(datasets.validation["one"], 20)) <= {"b", chr(EOD)}
    assert 12 <= letters(datasets.validation["two"], 20)["c"] <= 16
    assert build(config(paths["a"], validation=sets), train=5, validation=0).validation == {}
    clash = config(paths["a"], validation={"valid": sets["one"]}, split=[0.5, 0.5, 0.0])
    with pytest.raises(UserError, match="'valid'"):
        build(clash, validation=1)


def test_split_too_small_for_a_sample(tmp_path: Path) -> None:
    path = make_data(tmp_path / "a", ["x" * 7] * 10)
    assert build(config(path, sequence_length=79)).train
    for data, validation in (
        (config(path, sequence_length=80), 0),  # 80 tokens, 81 needed
        (config(path, sequence_length=8, split=[0.9, 0.1, 0.0]), 1),  # one document of 8 tokens
        (config(path, sequence_length=4, split=[0.99, 0.01, 0.0]), 1),  # no document at all
    ):
        with pytest.raises(UserError, match=r"split has \d+ tokens.*data\.split.*sequence_length"):
            build(data, validation=validation)
    for split in ([0.5, 0.5], [0.0, 1.0, 0.0]):
        with pytest.raises(UserError, match=r"data\.split"):
            build(config(path, split=split))


def test_more_samples_than_an_index_can_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before Megatron-Core counts a million epochs, or runs out of memory; nothing is written."""
    data = config(make_data(tmp_path / "a", ["x" * 800] * 100))
    with pytest.raises(UserError, match=r"10,000,000,000 samples .* 998,752 epochs; expected"):
        build(data, train=10**10)
    monkeypatch.setattr(megamoe.data.datasets, "available_bytes", lambda: 10 << 20)
    with pytest.raises(UserError, match=r"index needs 11 MiB of memory; 10 MiB are available"):
        build(data, train=10**6)
    assert not (tmp_path / "cache").exists()
    build(data, train=10)


def test_cache_is_used_and_knows_new_data(tmp_path: Path) -> None:
    path = make_data(tmp_path / "a", ["x" * 99] * 3)
    data = config(path)
    build(data)
    index = sorted((tmp_path / "cache").glob("*.npy"))
    assert len(index) == 3
    times = [file.stat().st_mtime_ns for file in index]
    build(data)
    assert [file.stat().st_mtime_ns for file in index] == times
    # Fewer tokens under the same name: the old index would read past the end.
    make_data(tmp_path / "a", ["y" * 30])
    dataset = build(data).train
    assert {int(token) for index in range(10) for token in dataset[index]["tokens"]} == {ord("y"), EOD}
    elsewhere = config(path, cache=str(tmp_path / "deep" / "elsewhere"))
    build(elsewhere)
    assert len(list((tmp_path / "deep" / "elsewhere").glob("*.npy"))) == 3


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    path = make_data(tmp_path / "a", ["x" * 99])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.cache"):
        build(config(path, cache=str(tmp_path / "file" / "cache")))


def build_on_rank(rank: int, size: int, data: DataConfig, folder: str) -> None:
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
    datasets = build(data, train=12, validation=4)
    sets = [datasets.train, *datasets.validation.values()]
    torch.save([[one[index]["tokens"] for index in range(4)] for one in sets], f"{folder}/rank{rank}")
    torch.distributed.destroy_process_group()


def test_two_ranks_see_the_same_as_one_process(tmp_path: Path) -> None:
    paths = [make_data(tmp_path / letter, [letter * 60] * 4) for letter in "abc"]
    validation = {"named": [SourceConfig(paths[0]), SourceConfig(paths[2])]}
    data = config(*paths[:2], weights=[1.0, 2.0], validation=validation, split=[0.75, 0.25, 0.0])
    context = torch.multiprocessing.start_processes(
        build_on_rank, (2, data, str(tmp_path)), nprocs=2, start_method="fork", join=False
    )
    assert context is not None
    deadline = time.monotonic() + 60
    while not context.join(timeout=1):  # True once every rank has ended; raises what a rank raised
        assert time.monotonic() < deadline
    data.cache = str(tmp_path / "cache_of_one")
    datasets = build(data, train=12, validation=4)
    expected = [datasets.train, *datasets.validation.values()]
    for rank in range(2):
        for found, one in zip(torch.load(tmp_path / f"rank{rank}"), expected, strict=True):
            for index in range(4):
                assert torch.equal(found[index], one[index]["tokens"])


def test_mock_is_deterministic_and_can_be_learnt() -> None:
    data = DataConfig(mock=True, sequence_length=500, split=[0.9, 0.1, 0.0], validation={"extra": []})
    vocabulary = resolve_vocabulary(data, None)
    assert vocabulary.size == 1024 and resolve_vocabulary(data, 77).size == 77
    datasets = build(data, train=10**9, validation=5)
    assert len(datasets.train) == 10**9 and list(datasets.validation) == ["valid", "extra"]  # type: ignore[arg-type]
    item, again = datasets.train[10**9 - 1], build(data, train=3).train[10**9 - 1]
    assert set(item) == {"tokens", "labels", "position_ids", "loss_mask"}
    assert all(torch.equal(item[key], again[key]) for key in item)
    assert torch.equal(item["tokens"][1:], item["labels"][:-1])
    last = 10**9 - 1
    others = [datasets.train[0], datasets.validation["valid"][last], build(data, seed=2).train[last]]
    assert not any(torch.equal(item["tokens"], other["tokens"]) for other in others)
    # Nine in ten follow the rule; a model can reach that, but no more.
    follows = ((item["labels"] - item["tokens"]) % 1024 == 7).float().mean()
    assert 0.85 < follows < 0.95 and item["tokens"].min() >= 0 and item["tokens"].max() < 1024
    assert "document_start" in build(DataConfig(mock=True, document_aware=True)).train[0]


@pytest.mark.parametrize("ends", [[], [0], [4], [0, 1, 2, 3, 4], [1, 3]])
def test_documents_equal_megatron_cores(ends: list[int]) -> None:
    """Its mask of S x S, made of our starts, and its positions and loss mask."""
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

    tokens = torch.ones(5, dtype=torch.int64)
    tokens[ends] = 0
    found = document_items(tokens, eod=0)
    mask, *expected = _get_ltor_masks_and_position_ids(tokens, 0, True, True, True, True)
    for key, tensor in zip(("loss_mask", "position_ids"), expected, strict=True):
        assert torch.equal(found[key], tensor) and found[key].dtype == tensor.dtype
    place = torch.arange(5)
    assert torch.equal(mask, ((place < found["document_start"][:, None]) | (place > place[:, None]))[None])


def test_the_index_is_the_same_with_documents_and_without(tmp_path: Path) -> None:
    """So prepared data, its cached index and the order of the samples are those of earlier versions."""
    path = make_data(tmp_path / "a", ["ab", "cde"] * 6)
    runs = [build(config(path, document_aware=aware), train=4).train for aware in (False, True)]
    descriptions = [run.unique_description for run in runs]  # type: ignore[attr-defined]
    assert descriptions[0] == descriptions[1] and "mask" not in descriptions[0]
    assert all(torch.equal(runs[0][index]["tokens"], runs[1][index]["tokens"]) for index in range(4))


def test_card_survives_a_moved_folder(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    make_data(tmp_path / "old" / "a", ["x" * 50], tokenizer="train")
    (tmp_path / "old").rename(tmp_path / "new")
    moved = config(str(tmp_path / "new" / "a"))
    card = load_card(moved.sources[0].path)
    tokenizer = resolve_vocabulary(moved, None).tokenizer
    assert card is not None and tokenizer is not None and tokenizer.fingerprint == card.tokenizer.fingerprint
