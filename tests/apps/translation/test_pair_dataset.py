"""Pairs by number, and the plan of batches: shares, order, lengths, and ranks that see what one rank sees."""

import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from megamoe.apps.translation.dataset import (
    OrderedPairs,
    PairDataset,
    PairOptions,
    cut_batches,
    epoch_order,
    evaluated_pairs,
    verify_pairs,
)
from megamoe.config.schema import DataConfig, SourceConfig
from megamoe.data.vocabulary import Vocabulary, resolve_vocabulary
from megamoe.errors import UserError
from tests.support.data.pairs import make_pairs

SIZES = {"de": 90, "fr": 40, "it": 11}


@pytest.fixture(name="prefix", scope="module")
def _prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Pairs of bytes in three languages."""
    return str(make_pairs(tmp_path_factory.mktemp("pairs"), [1, 0, 0], SIZES) / "train")


@pytest.fixture(name="vocabulary", scope="module")
def _vocabulary(prefix: str) -> Vocabulary:
    sides = [SourceConfig(path=f"{prefix}.{side}") for side in ("source", "target")]
    return resolve_vocabulary(DataConfig(sources=sides), None)


@pytest.mark.parametrize("tag", ["source", "target", "none"])
def test_items_by_hand(prefix: str, vocabulary: Vocabulary, tag: str) -> None:
    pairs = PairDataset(prefix, vocabulary, PairOptions(direction="both", tag=tag))  # type: ignore[arg-type]
    assert pairs.groups == ["en-de", "en-fr", "en-it", "de-en", "fr-en", "it-en"]
    assert pairs.sizes == [90, 40, 11, 90, 40, 11] and len(pairs) == 2 * 141
    for number, (group, source, target, language) in {
        3: (0, "3333", "dddd", "de"),
        90: (1, "0", "f", "fr"),
        140: (2, "10", "i" * 11, "it"),
        141 + 3: (3, "dddd", "3333", "en"),
    }.items():
        item = pairs[number]
        tags = [vocabulary.special.languages[language]]
        begins = {"source": tags if tag == "source" else [], "target": tags if tag == "target" else []}
        assert int(item["language"]) == group
        for side, expected in (("source", source), ("target", target)):
            assert item[side].dtype == torch.int64
            assert item[side].tolist() == [*begins[side], *expected.encode(), vocabulary.eod]
    for side, lengths in (("source", pairs.source_lengths), ("target", pairs.target_lengths)):
        assert lengths.tolist() == [len(pairs[number][side]) for number in range(len(pairs))]


def test_languages_and_direction(prefix: str, vocabulary: Vocabulary) -> None:
    pairs = PairDataset(prefix, vocabulary, PairOptions(languages=("IT", "de"), direction="into"))
    assert pairs.groups == ["de-en", "it-en"]
    assert bytes(pairs[90]["source"][1:-1].tolist()) == b"i"
    with pytest.raises(UserError, match="language 'pl' is not in the data; there are de, fr, it"):
        PairDataset(prefix, vocabulary, PairOptions(languages=("pl",)))


def test_too_long(prefix: str, vocabulary: Vocabulary) -> None:
    with pytest.raises(UserError, match=r"\d+ of 141 have a side .* data.sequence_length 10.*18; .*drop"):
        PairDataset(prefix, vocabulary, PairOptions(max_length=10))
    whole = PairDataset(prefix, vocabulary)
    cut = PairDataset(prefix, vocabulary, PairOptions(max_length=10, too_long="truncate"))
    kept = PairDataset(prefix, vocabulary, PairOptions(max_length=10, too_long="drop"))
    fit = [n for n in range(141) if max(whole.source_lengths[n], whole.target_lengths[n]) <= 10]
    assert len(kept) == len(fit)
    for place, number in enumerate(fit):
        assert all(torch.equal(kept[place][key], whole[number][key]) for key in whole[number])
    assert sum(kept.sizes) == len(fit) and cut.sizes == whole.sizes
    for number in range(141):
        item, target = cut[number], whole[number]["target"]
        short = target if len(target) <= 10 else torch.cat((target[:9], target[-1:]))
        assert torch.equal(item["target"], short) and cut.target_lengths[number] == len(short)


def test_files_that_do_not_fit(prefix: str, vocabulary: Vocabulary, tmp_path: Path) -> None:
    shutil.copytree(Path(prefix).parent, tmp_path, dirs_exist_ok=True)
    copy = str(tmp_path / "train")
    pairs = PairDataset(copy, vocabulary)
    data = DataConfig(cache=str(tmp_path / "cache"))
    assert len(verify_pairs(data, [copy], vocabulary)) == 2
    content = (tmp_path / "train.target.bin").read_bytes()
    (tmp_path / "train.target.bin").write_bytes(content[:-2])
    with pytest.raises(UserError, match=r"train.target.bin had \d+ bytes and now has"):
        pairs[140]
    (tmp_path / "train.target.bin").write_bytes(content[:-2] + b"\xff\xff")
    with pytest.raises(UserError, match=r"text 140 of .*outside of the vocabulary"):
        pairs[140]
    with pytest.raises(UserError, match=r"SHA-256"):
        verify_pairs(data, [copy], vocabulary)
    for ending in ("bin", "idx", "card.json"):
        (tmp_path / f"train.target.{ending}").write_bytes((tmp_path / f"train.source.{ending}").read_bytes())
    with pytest.raises(UserError, match="the target side has 141 texts of another preparation"):
        PairDataset(copy, vocabulary)
    with pytest.raises(UserError, match=r"no file .*valid.pairs.json.*there is train.pairs.json"):
        PairDataset(str(tmp_path / "valid"), vocabulary)
    with pytest.raises(UserError, match=r"raise model.vocab_size"):
        PairDataset(prefix, Vocabulary(10, 0, None))
    with pytest.raises(UserError, match=r"the tokenizer reserves no <2de>"):
        PairDataset(prefix, Vocabulary(1000, 256, None))


@pytest.mark.parametrize("exponent", [1.0, 0.7, 0.0])
def test_shares_of_the_groups(exponent: float) -> None:
    sizes = [1000, 100, 10]
    epochs = [epoch_order(["a", "b", "c"], sizes, exponent, 1, epoch) for epoch in range(40)]
    drawn = np.concatenate(epochs)
    group_N = np.searchsorted([1000, 1100], drawn, side="right")
    parts = [size**exponent for size in sizes]
    for group, part in enumerate(parts):
        assert abs((group_N == group).sum() - 40 * 1110 * part / sum(parts)) < 1
    if exponent == 1:  # each pair once an epoch
        assert all(sorted(epoch) == list(range(1110)) for epoch in epochs)
    # Within a group no pair comes again before all others have come.
    counts = np.bincount(drawn, minlength=1110)
    for first, last in ((0, 1000), (1000, 1100), (1100, 1110)):
        assert counts[first:last].max() - counts[first:last].min() <= 1
    assert np.array_equal(epochs[3], epoch_order(["a", "b", "c"], sizes, exponent, 1, 3))
    assert not np.array_equal(epochs[3], epoch_order(["a", "b", "c"], sizes, exponent, 2, 3))


def test_batches_have_similar_widths() -> None:
    rng = np.random.default_rng(0)
    width_N = rng.integers(1, 60, 500)
    order_N = rng.permutation(500)
    batches = cut_batches(order_N, width_N, pairs=7, generator=rng).reshape(71, 7)
    assert {*batches.flat} == {*order_N[: 71 * 7]}  # what is left out is not the longest
    ends = sorted((int(width_N[batch].min()), int(width_N[batch].max())) for batch in batches)
    assert all(left[1] <= right[0] for left, right in pairwise(ends))


def test_samples_are_the_planned_batches(prefix: str, vocabulary: Vocabulary) -> None:
    pairs = PairDataset(prefix, vocabulary)
    ordered = OrderedPairs(pairs, 240, seed=3, pairs=4)
    assert len(ordered) == 240
    planned = [*ordered.epoch(0), *ordered.epoch(1)]
    assert {*Counter(planned[:140]).values()} == {1} == {*Counter(planned[140:]).values()}
    for number in (239, 0, 30, 139, 140):
        expected = pairs[int(planned[number])]
        assert all(torch.equal(ordered[number][key], expected[key]) for key in expected)
    with pytest.raises(IndexError):
        ordered[240]


def test_an_evaluation_leaves_no_pair_out(prefix: str, vocabulary: Vocabulary) -> None:
    """141 pairs in batches of 4: in training a rest of one is left out, another one for each seed."""
    pairs = PairDataset(prefix, vocabulary)
    targets = Counter(repr(pairs[number]) for number in range(141))
    for samples, least, most in ((141, 1, 1), (144, 1, 2), (300, 2, 3)):
        for seed in (1, 2):
            found = evaluated_pairs(pairs, seed=seed, pairs=4, num_samples=samples)
            drawn = Counter(repr(found[number]) for number in range(len(found)))
            assert len(found) == samples and drawn.keys() == targets.keys()
            assert all(
                least * targets[item] <= count <= most * targets[item] for item, count in drawn.items()
            )
    first, again, other = (
        [repr(found[number]) for number in range(144)]
        for found in (evaluated_pairs(pairs, seed=seed, pairs=4, num_samples=144) for seed in (1, 1, 2))
    )
    assert first == again != other
    widths = [max(len(found[number][side]) for side in ("source", "target")) for number in range(300)]
    gaps = [max(widths[at : at + 4]) - min(widths[at : at + 4]) for at in range(0, 300, 4)]
    assert sum(gaps) <= max(widths) - min(widths)  # the batches divide the range
    with pytest.raises(IndexError):
        found[300]
    with pytest.raises(UserError, match="^pairs: found none to evaluate"):
        evaluated_pairs(_Nothing(), seed=1, pairs=4, num_samples=8)  # type: ignore[arg-type]


class _Nothing:
    def __len__(self) -> int:
        return 0


def test_too_few_pairs(prefix: str, vocabulary: Vocabulary) -> None:
    pairs = PairDataset(prefix, vocabulary)
    with pytest.raises(UserError, match="141 pairs make no batch of 142"):
        OrderedPairs(pairs, 1, seed=0, pairs=142)
