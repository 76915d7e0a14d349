"""`data.order: samples`: each sample once an epoch, no index, an order that no run's length changes."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megamoe.config.schema import DataConfig
from megamoe.data import sample_order
from megamoe.data.sample_order import PERIOD, Permutation
from megamoe.errors import UserError
from tests.support.data.sources import build, config, letters, make_bare_data, make_data


def ordered(*paths: str, **options: object) -> DataConfig:
    return config(*paths, order="samples", **options)  # type: ignore[arg-type]


def starts(dataset: torch.utils.data.Dataset, numbers: range) -> list[int]:
    return [int(dataset[number]["tokens"][0]) for number in numbers]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_a_permutation_has_every_number_once(size: int) -> None:
    for key in ("a", "b"):
        permutation = Permutation(size, key)
        found = [permutation(place) for place in range(size)]
        assert sorted(found) == list(range(size))
        assert found == [Permutation(size, key)(place) for place in range(size)]
    assert size < 64 or found != [Permutation(size, "a")(place) for place in range(size)]


def test_a_permutation_is_as_random_as_one() -> None:
    """Over keys every place has every number equally often, and neighbours are not near each other."""
    size, keys = 13, 1300
    table = np.array([[Permutation(size, str(key))(place) for place in range(size)] for key in range(keys)])
    counts = np.array([np.bincount(table[:, place], minlength=size) for place in range(size)])
    expected = keys / size
    # Chi-squared with (size - 1)^2 degrees of freedom, within 5 standard deviations.
    freedom = (size - 1) ** 2
    assert abs(((counts - expected) ** 2 / expected).sum() - freedom) < 5 * (2 * freedom) ** 0.5
    steps = np.diff(table, axis=1)
    assert abs((np.abs(steps) == 1).mean() - 2 / size) < 5 * (2 / size / steps.size) ** 0.5
    large = Permutation(10**12, "x")
    found = np.array([large(place) for place in range(2000)]) / 1e12
    assert abs(found.mean() - 0.5) < 0.04 and abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.12


def test_each_epoch_has_every_sample_once_in_another_order(tmp_path: Path) -> None:
    text = "".join(chr(33 + place) for place in range(65))
    data = ordered(make_data(tmp_path / "a", [text[:20], text[20:]]))
    dataset = build(data, train=24).train
    tokens = IndexedDataset(data.sources[0].path)
    stream = np.concatenate([tokens[0], tokens[1]]).astype(int).tolist()
    epochs = []
    for epoch in range(3):
        numbers = range(8 * epoch, 8 * epoch + 8)
        places = [stream.index(start) // 8 for start in starts(dataset, numbers)]
        assert sorted(places) == list(range(8))
        for number, place in zip(numbers, places, strict=True):
            item = dataset[number]
            assert item["tokens"].tolist() == stream[8 * place : 8 * place + 8]
            assert item["labels"].tolist() == stream[8 * place + 1 : 8 * place + 9]
            assert item["position_ids"].tolist() == list(range(8)) and item["loss_mask"].sum() == 8
        epochs.append(places)
    assert epochs[0] != epochs[1] != epochs[2]
    assert starts(build(data, train=500).train, range(24)) == starts(dataset, range(24))
    assert starts(build(data, train=24, seed=2).train, range(24)) != starts(dataset, range(24))
    assert not list(tmp_path.glob("cache/*.npy"))


def test_split_and_documents(tmp_path: Path) -> None:
    path = make_data(tmp_path / "a", ["t" * 8] * 8 + ["v" * 8] * 2)
    data = ordered(path, split=[0.8, 0.2, 0.0], document_aware=True, sequence_length=9)
    datasets = build(data, train=7, validation=1)
    assert letters(datasets.train, 7) == Counter("t" * 7)
    assert letters(datasets.validation["valid"], 1) == Counter("v")
    # Documents of 9 tokens in samples of 9: each sample is a document, whose end has no loss.
    assert datasets.train[3]["document_start"].tolist() == [0] * 9
    assert datasets.train[3]["loss_mask"].tolist() == [1] * 8 + [0]


def test_blend_takes_turns_like_megatron_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [make_data(tmp_path / letter, [letter * 500] * 4) for letter in "abc"]
    weights = [5.0, 3.0, 2.0]

    def order_of(data: DataConfig) -> list[int]:
        dataset = build(data, train=200).train
        # The most frequent token: a sample may begin at the end of a document.
        return [int(dataset[index]["tokens"].mode().values) for index in range(200)]

    assert order_of(ordered(*paths, weights=weights)) == order_of(config(*paths, weights=weights))
    # The next period goes on in each source where this one ends: over both each sample comes equally often.
    dataset = build(ordered(*paths, weights=weights), train=2 * PERIOD).train
    assert [dataset[PERIOD + index]["tokens"].shape for index in (0, PERIOD - 1)] == [(8,)] * 2
    numbers: list[tuple[str, int]] = []

    def noted(source: object, number: int) -> tuple[np.ndarray, list[int]]:
        numbers.append((Path(source.path).stem, number))  # type: ignore[attr-defined]
        return np.zeros(9, dtype=np.int64), []

    monkeypatch.setattr(sample_order._Source, "sample", noted)
    for index in [*range(99), *range(PERIOD - 99, PERIOD + 99)]:
        dataset[index]
    for name in "abc":
        found = [number for each, number in numbers if each == name]
        assert found == sorted(set(found))
        # Without a gap over the end of the period.
        late = [number for number in found if number > PERIOD // 10]
        assert late == list(range(late[0], late[0] + len(late)))


def test_weights_too_small(tmp_path: Path) -> None:
    paths = [make_data(tmp_path / letter, [letter * 90]) for letter in "ab"]
    with pytest.raises(UserError, match=r"b': its share of the blend is 1e-09, less than one of 1,048,576"):
        build(ordered(*paths, weights=[1.0, 1e-9]), train=3)


def test_changed_files(tmp_path: Path) -> None:
    path = make_data(tmp_path / "a", ["x" * 200])
    dataset = build(ordered(path), train=9).train
    with pytest.raises(IndexError):
        dataset[9]
    with open(f"{path}.bin", "r+b") as file:
        file.write(b"\xff\xff" * 201)
    with pytest.raises(UserError, match=r"a\.bin holds no token id: 65535, the vocabulary has 257"):
        dataset[0]
    os.truncate(f"{path}.bin", 8)
    with pytest.raises(UserError, match=r"a\.bin had 402 bytes and now has 8; prepare it again"):
        dataset[0]


def test_data_without_a_card(tmp_path: Path) -> None:
    data = ordered(make_bare_data(tmp_path / "bare"), tokenizer="bytes")
    found = build(data, train=7).train
    assert sorted(starts(found, range(7))) == [0, 8, 16, 24, 102, 110, 118]
