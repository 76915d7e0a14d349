"""Masked language modelling: what is chosen, what stands in its place, and what decides the draws."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megamoe.data.batches import Item
from megamoe.data.special import SpecialTokens
from megamoe.data.tokenizers import ByteTokenizer, word_starts
from megamoe.data.vocabulary import Vocabulary
from megamoe.errors import UserError
from megamoe.objectives.masked import Masked
from tests.support.tiny import tiny

WORDS, LENGTH, EOD = 100, 64, 0
VOCABULARY = Vocabulary(WORDS, EOD, None).with_added(1)
MASK = WORDS
ENCODER = ("model.architecture=encoder", "train.objective=masked")


def objective(vocabulary: Vocabulary = VOCABULARY, seed: int = 1, **options: Any) -> Masked:
    return Masked(Masked.Config(**options), tiny(*ENCODER, f"seed={seed}"), vocabulary)


def by_words(probability: float) -> Masked:
    """The objective that masks whole words, of bytes."""
    vocabulary = Vocabulary(257, 256, ByteTokenizer()).with_added(1)
    return objective(vocabulary, unit="word", probability=probability)


def item(number: int, length: int = LENGTH) -> Item:
    tokens = torch.randint(WORDS, (length,), generator=torch.Generator().manual_seed(number))
    return {
        "tokens": tokens,
        "labels": tokens.roll(-1),
        "position_ids": torch.arange(length),
        "loss_mask": torch.ones(length),
    }


def samples(made: Masked, count: int = 300) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens before, after, and which were chosen, [count, S]."""
    found = [made.sample(item(number), f"train/{number}") for number in range(count)]
    before = torch.stack([item(number)["tokens"] for number in range(count)])
    assert all(torch.equal(each["labels"], row) for each, row in zip(found, before, strict=True))
    chosen = torch.stack([each["loss_mask"] for each in found]).bool()
    return before, torch.stack([each["tokens"] for each in found]), chosen


@pytest.mark.parametrize("unit", ["token", "span"])
def test_the_wanted_share_is_chosen_exactly(unit: str) -> None:
    before, after, chosen = samples(objective(unit=unit, probability=0.2))
    free = (before != EOD).sum(1)
    assert chosen.sum(1).tolist() == [round(0.2 * int(count)) for count in free]
    assert not (chosen & (before == EOD)).any()
    assert torch.equal(after[~chosen], before[~chosen])


@pytest.mark.parametrize("unit", ["token", "span"])
def test_shares_of_mask_random_and_kept(unit: str) -> None:
    """Within four standard deviations; a random token is the old one in one of a hundred draws."""
    before, after, chosen = samples(objective(unit=unit, probability=0.3, mask=0.7, random=0.2), 600)
    total = int(chosen.sum())
    drawn = total / (3.8 if unit == "span" else 1)  # independent draws
    for share, found in ((0.7, after == MASK), (0.1 + 0.2 / (WORDS - 1), after == before)):
        deviation = (share * (1 - share) / drawn) ** 0.5
        assert abs(int((found & chosen).sum()) / total - share) < 4 * deviation
    others = after[chosen & (after != MASK) & (after != before)]
    assert others.min() > EOD and others.max() < WORDS
    assert len(others.unique()) > 0.9 * WORDS


def test_random_tokens_are_those_of_a_vocabulary_that_is_smaller_than_the_models() -> None:
    special = SpecialTokens({"<pad>": 1})
    data = Vocabulary(1024, EOD, None, special, in_data=WORDS)
    made = objective(data.with_added(1, 1024), probability=1.0, mask=0.0, random=1.0)
    _, after, chosen = samples(made, 100)
    drawn = after[chosen].unique().tolist()
    assert drawn == [number for number in range(WORDS) if number not in (EOD, 1)]
    assert made.mask_id == 1023


def test_every_place_is_chosen_as_often() -> None:
    _, _, chosen = samples(objective(), 2000)
    rate = chosen.float().mean(0)
    assert (rate - rate.mean()).abs().max() < 4.5 * (0.15 * 0.85 / 2000) ** 0.5


def test_lengths_of_spans() -> None:
    """Their mean is SpanBERT's 3.8; a sequence's last one ends where enough tokens are chosen."""
    made = objective(unit="span")
    lengths: list[int] = []
    for number in range(400):
        units = made._units(np.ones(256, dtype=np.int64), made.draws(f"train/{number}"))
        assert sum(map(len, units)) == 38
        assert all((np.diff(unit) == 1).all() for unit in units)
        lengths += [len(unit) for unit in units[:4]]  # 38 tokens hold at least four spans
    weights = [0.8 ** (n - 1) for n in range(1, 11)]
    expected = sum(n * weight for n, weight in enumerate(weights, 1)) / sum(weights)
    assert abs(float(np.mean(lengths)) - expected) < 4 * 2.7 / len(lengths) ** 0.5
    assert max(lengths) == 10 and abs(expected - 3.8) < 0.01


def test_whole_words_of_text() -> None:
    tokenizer = ByteTokenizer()
    made = by_words(0.3)
    text = "The quick brown fox, it jumps; naïve words über alles."
    tokens = torch.tensor(tokenizer.encode(text))
    places = range(len(tokens))
    cut = [0, *np.flatnonzero(word_starts(tokenizer)(tokens.numpy()))[1:].tolist(), len(tokens)]
    words = [set(range(first, last)) for first, last in pairwise(cut)]
    assert "brown" in ["".join(chr(int(tokens[place])) for place in sorted(word)) for word in words]
    seen = set()
    for number in range(60):
        given = {**item(0, len(tokens)), "tokens": tokens}
        mask = made.sample(given, f"train/{number}")["loss_mask"]
        chosen = {place for place in places if mask[place]}
        assert 0 < len(chosen) <= round(0.3 * len(tokens))
        assert all(word <= chosen or not word & chosen for word in words)
        seen |= chosen
    assert seen == set(places)


def test_a_single_long_word_is_cut() -> None:
    made = by_words(0.25)
    found = made.sample({**item(0, 8), "tokens": torch.full((8,), ord("a"))}, "train/0")
    assert found["loss_mask"].sum() == 2


def test_of_words_that_are_all_too_long_a_random_one_is_cut() -> None:
    made = by_words(0.2)
    tokens = torch.tensor([*b"aaaa", 256, *b"bbbb"])
    given = {**item(0, len(tokens)), "tokens": tokens}
    masks = [made.sample(given, f"train/{number}")["loss_mask"] for number in range(20)]
    assert any(mask[:4].any() for mask in masks) and any(mask[4:].any() for mask in masks)


def test_draws_depend_on_seed_dataset_and_number_alone() -> None:
    made = objective()

    def masks(made: Masked, place: str) -> Tensor:
        return made.sample(item(3), place)["tokens"]

    assert torch.equal(masks(made, "train/3"), masks(objective(), "train/3"))
    for other in (masks(made, "train/4"), masks(made, "valid/3"), masks(objective(seed=2), "train/3")):
        assert not torch.equal(masks(made, "train/3"), other)


def test_batch_names_the_places_with_a_loss() -> None:
    made = objective()
    batch = made.batch([made.sample(item(number), f"train/{number}") for number in range(3)], [0, 1, 2])
    assert batch.predicted_P is not None
    whole = torch.zeros(LENGTH * 3)
    whole[batch.predicted_P] = 1
    assert torch.equal(whole.view(LENGTH, 3).T, batch.loss_mask_BS)


def test_only_ends_of_documents() -> None:
    made = objective()
    found = made.sample({**item(0), "tokens": torch.zeros(LENGTH, dtype=torch.int64)}, "train/0")
    assert found["loss_mask"].sum() == 0 and not found["tokens"].any()


def test_a_reserved_mask_is_used_and_reserved_tokens_are_left_alone() -> None:
    data = Vocabulary(WORDS, EOD, None, SpecialTokens({"<pad>": 1, "<mask>": 2}))
    assert Masked.added_ids(Masked.Config(), tiny(*ENCODER), data) == 0
    made = objective(data, probability=1.0, mask=0.5, random=0.5)
    tokens = item(1)["tokens"]
    found = made.sample(item(1), "train/1")["tokens"]
    assert (found == made.mask_id).sum() > 10 and made.mask_id == 2
    assert torch.equal(found[tokens <= 2], tokens[tokens <= 2])
    assert not ((found <= 1) & (tokens > 2)).any()


def test_whole_words_need_a_tokenizer() -> None:
    with pytest.raises(UserError, match="unit word needs the data's tokenizer"):
        objective(unit="word")
