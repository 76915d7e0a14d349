"""The size of the vocabulary and the tokenizer, found from data cards and settings."""

from pathlib import Path

import pytest

from megamoe.apps.prepare.new_tokenizers import train_bpe
from megamoe.config.schema import SourceConfig
from megamoe.data.datasets import build_datasets, resolve_vocabulary
from megamoe.errors import UserError
from tests.support.data.sources import EOD, config, make_bare_data, make_data


def test_vocabulary_of_the_card_and_of_the_model(tmp_path: Path) -> None:
    data = config(make_data(tmp_path / "a", ["x" * 50]))
    found = resolve_vocabulary(data, None)
    assert (found.size, found.eod) == (257, 256)
    assert found.tokenizer is not None and found.tokenizer.name == "bytes"
    assert resolve_vocabulary(data, 300).size == 300
    with pytest.raises(UserError, match=r"model\.vocab_size 256 .*257"):
        resolve_vocabulary(data, 256)


def test_added_ids_lie_in_the_size_that_is_given(tmp_path: Path) -> None:
    data = config(make_data(tmp_path / "a", ["x" * 50]))
    behind = resolve_vocabulary(data, None).with_added(3)
    assert (behind.size, behind.added, behind.of_data.size) == (260, 3, 257)
    for size in (260, 300):
        inside = resolve_vocabulary(data, size).with_added(3, size)
        assert (inside.size, inside.added, inside.of_data.size) == (size, 3, size - 3)
    assert resolve_vocabulary(data, 257).with_added(0, 257).size == 257
    with pytest.raises(UserError, match="model.vocab_size 259 .* the 3 ids .*; raise it to 260 or leave"):
        resolve_vocabulary(data, 259).with_added(3, 259)


def test_vocabulary_that_does_not_fit_names_both_sizes(tmp_path: Path) -> None:
    train_bpe(["hello hello"], 259, tmp_path / "t.json")
    plain = make_data(tmp_path / "a", ["x" * 50])
    trained = make_data(tmp_path / "b", ["x" * 50], tokenizer=str(tmp_path / "t.json"))
    for data in (config(plain, tokenizer=str(tmp_path / "t.json")), config(plain, trained)):
        with pytest.raises(UserError, match=r"257.*259|259.*257"):
            resolve_vocabulary(data, None)
    validation = config(plain, validation={"other": [SourceConfig(trained)]})
    with pytest.raises(UserError, match="another tokenizer"):
        resolve_vocabulary(validation, None)


def test_tokenizer_of_the_card_changed_or_gone(tmp_path: Path) -> None:
    train_bpe(["hello hello"], 259, tmp_path / "t.json")
    data = config(make_data(tmp_path / "a", ["x" * 50], tokenizer=str(tmp_path / "t.json")))
    assert resolve_vocabulary(data, None).tokenizer is not None
    train_bpe(["bye bye"], 258, tmp_path / "t.json")
    with pytest.raises(UserError, match="changed since"):
        resolve_vocabulary(data, None)
    (tmp_path / "t.json").unlink()
    found = resolve_vocabulary(data, None)
    assert (found.size, found.eod, found.tokenizer) == (259, 0, None)


def test_data_without_a_card(tmp_path: Path) -> None:
    path = make_bare_data(tmp_path / "bare")
    with pytest.raises(UserError, match=r"no data card.*data\.tokenizer or model\.vocab_size"):
        resolve_vocabulary(config(path), None)
    found = resolve_vocabulary(config(path), 500)
    assert (found.size, found.eod) == (500, None)
    assert resolve_vocabulary(config(path, tokenizer="bytes"), None).eod == EOD
    datasets = build_datasets(config(path), found, seed=1, train_samples=3, validation_samples=0)
    assert datasets.train[0]["tokens"].max() < 130
    with pytest.raises(UserError, match="document_aware"):
        aware = config(path, document_aware=True)
        build_datasets(aware, found, seed=1, train_samples=3, validation_samples=0)
