"""Samples of an epoch against Megatron-Core's own count; a blend's weights by hand and in what is drawn."""

from pathlib import Path

import pytest

from megamoe.config.schema import SourceConfig
from megamoe.data.card import DataFiles, load_card
from megamoe.data.datasets import blend_weights, samples_per_epoch
from tests.support.data.sources import ONLY_TRAIN, build, config, letters, make_bare_data, make_data


def sources(folder: Path, **tokens: int) -> list[str]:
    """Data of one document each, by the letter that it repeats; tokens: with the end of the document."""
    return [make_data(folder / letter, [letter * (count - 1)]) for letter, count in tokens.items()]


@pytest.mark.parametrize("split", [ONLY_TRAIN, [0.5, 0.5, 0.0], [3, 1, 0]], ids=str)
def test_an_epoch_is_megatrons(tmp_path: Path, split: list[float]) -> None:
    """One sample more, and its dataset begins a second pass over the documents."""
    data = config(make_data(tmp_path / "a", ["x" * length for length in (40, 31, 50, 22)]), split=split)
    count = samples_per_epoch(data)
    documents = {1.0: 4, 0.5: 2, 0.75: 3}[split[0] / sum(split)]
    assert count == (sum([41, 32, 51, 23][:documents]) - 1) // 8
    for asked, passes in ((count, 1), (count + 1, 2)):
        dataset = build(data, train=asked).train
        assert len(dataset.document_index) == passes * documents  # type: ignore[attr-defined]


def test_sources_add_up_whatever_their_weights(tmp_path: Path) -> None:
    data = config(*sources(tmp_path, a=81, b=41), weights=[1.0, 9.0])
    assert samples_per_epoch(data) == 80 // 8 + 40 // 8


def test_weights_by_hand(tmp_path: Path) -> None:
    """The sources have 16 and 256 tokens; with a = 1/2 the weights are as 4 to 16."""
    both = [SourceConfig(path) for path in sources(tmp_path, a=16, b=256)]
    assert blend_weights(both, 0.5) == pytest.approx([0.2, 0.8])
    assert blend_weights(both, 1.0) == pytest.approx([16 / 272, 256 / 272])
    assert blend_weights(both, 0.0) == [0.5, 0.5]
    assert blend_weights([SourceConfig("a", 1.0), SourceConfig("b", 3.0)], None) == [0.25, 0.75]


def test_data_without_a_card_is_weighed_by_its_index(tmp_path: Path) -> None:
    bare = make_bare_data(tmp_path / "bare")  # 60 tokens
    (other,) = sources(tmp_path, a=60)
    assert load_card(bare) is None and not DataFiles(Path(bare)).card.exists()
    assert blend_weights([SourceConfig(bare), SourceConfig(other)], 0.7) == [0.5, 0.5]


def test_a_blend_draws_by_the_exponent(tmp_path: Path) -> None:
    """900 tokens and 100: 9 samples of 10 by size, 3 of 4 at a = 1/2."""
    paths = sources(tmp_path, a=900, b=100)
    for exponent, expected in ((1.0, 90), (0.5, 75), (0.0, 50)):
        found = letters(build(config(*paths, sampling_exponent=exponent), train=100).train, 100)
        assert abs(found["a"] - expected) <= 2 and abs(found["b"] - (100 - expected)) <= 2


def test_further_validation_sets_keep_their_own_weights(tmp_path: Path) -> None:
    paths = sources(tmp_path, a=900, b=100)
    validation = {"even": [SourceConfig(path) for path in paths]}
    data = config(*paths, sampling_exponent=1.0, validation=validation)
    found = letters(build(data, train=100, validation=100).validation["even"], 100)
    assert abs(found["a"] - 50) <= 2
