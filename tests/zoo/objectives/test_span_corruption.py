"""Span corruption: source and target together are the sequence, and the sizes are those of T5."""

from typing import Any

import pytest
import torch

from megamoe.config.shapes import length_multiple
from megamoe.data.batches import Item, pair_batch
from megamoe.data.special import SpecialTokens
from megamoe.data.vocabulary import Vocabulary
from megamoe.errors import UserError
from megamoe.zoo.objectives.span_corruption import SpanCorruption
from tests.support.tiny import tiny

WORDS, EOD = 50, 7
BOTH = ("model.architecture=encoder_decoder", "train.objective=span_corruption", "moe.layers=none")


def objective(length: int = 128, *overrides: str, **options: Any) -> SpanCorruption:
    config = tiny(*BOTH, f"data.sequence_length={length}", *overrides)
    chosen = SpanCorruption.Config(**options)
    data = Vocabulary(WORDS, EOD, None)
    vocabulary = data.with_added(SpanCorruption.added_ids(chosen, config, data))
    return SpanCorruption(chosen, config, vocabulary)


def item(number: int, length: int = 128) -> Item:
    return {"tokens": torch.randint(WORDS, (length,), generator=torch.Generator().manual_seed(number))}


def joined(source: list[int], target: list[int]) -> tuple[list[int], list[int]]:
    """Fill the gaps: return the sequence, and the lengths of the spans."""
    assert target[-1] == source[-1] == EOD
    spans: dict[int, list[int]] = {}
    for token in target[:-1]:
        if token >= WORDS:
            spans[token] = []
        else:
            spans[max(spans)].append(token)
    sequence = []
    for token in source[:-1]:
        sequence += spans[token] if token >= WORDS else [token]
    assert [token for token in source if token >= WORDS] == list(spans) == sorted(spans)
    return sequence, [len(span) for span in spans.values()]


def test_the_sequence_can_be_put_together_again() -> None:
    made = objective()
    lengths: list[int] = []
    for number in range(200):
        found = made.sample(item(number), f"train/{number}")
        sequence, spans = joined(found["source"].tolist(), found["target"].tolist())
        assert sequence == item(number)["tokens"].tolist()
        assert (len(spans), sum(spans)) == (6, 19)  # 128 x 0.15, and spans of 3
        lengths += spans
    # Lengths of a random cut of 19 into 6: P(1) = C(17, 4) / C(18, 5).
    share = lengths.count(1) / len(lengths)
    assert abs(share - 2380 / 8568) < 4 * (0.278 * 0.722 / len(lengths)) ** 0.5
    assert min(lengths) == 1 and max(lengths) > 8


def test_a_source_is_never_longer_than_its_sample() -> None:
    """Spans of one token each take as many places as they hide, and the end takes one more."""
    made = objective(mean_span=1.0)
    found = made.sample(item(1), "train/1")
    assert len(found["source"]) == 128
    assert joined(found["source"].tolist(), found["target"].tolist())[0] == item(1)["tokens"].tolist()[:127]
    shares = SpanCorruption.shares(made.options, made.config)
    assert (shares.encoder, shares.decoder) == (1.0, len(found["target"]) / 128)


def test_draws_are_those_of_the_sample() -> None:
    first, again, other = (objective().sample(item(1), place)["source"] for place in ("a/1", "a/1", "a/2"))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_batch_of_pairs() -> None:
    pairs = [
        {"source": torch.tensor([5, 6, 8]), "target": torch.tensor([9, EOD])},
        {"source": torch.tensor([4]), "target": torch.tensor([3, 2, 1, 1, EOD])},
    ]
    batch = pair_batch(pairs, [10, 11], start=EOD, pad=0, multiple=2)
    assert batch.source_BL is not None and batch.lengths_B is not None and batch.source_lengths_B is not None
    assert batch.source_BL.tolist() == [[5, 6, 8, 0], [4, 0, 0, 0]]
    assert batch.tokens_BS.tolist() == [[EOD, 9, 0, 0, 0, 0], [EOD, 3, 2, 1, 1, 0]]
    assert batch.labels_BS.tolist() == [[9, EOD, 0, 0, 0, 0], [3, 2, 1, 1, EOD, 0]]
    assert batch.loss_mask_BS.sum(1).tolist() == [2, 5]
    assert batch.position_ids_BS.tolist() == [[0, 1, 0, 0, 0, 0], [0, 1, 2, 3, 4, 0]]
    assert (batch.lengths_B.tolist(), batch.source_lengths_B.tolist()) == ([2, 5], [3, 1])
    with pytest.raises(
        UserError, match="the target of pair 11 has 5 tokens, more than data.sequence_length 4"
    ):
        pair_batch(pairs, [10, 11], start=EOD, longest=4)
    pairs[1]["source"] = pairs[1]["source"][:0]
    with pytest.raises(UserError, match="the source of pair 11 is empty"):
        pair_batch(pairs, [10, 11], start=EOD)


@pytest.mark.parametrize(
    ("overrides", "multiple"),
    [
        (["parallel.tensor=2"], 2),
        (["model.fp8=tensorwise"], 16),
        (["model.fp8=mxfp8", "parallel.tensor=2", "parallel.sequence=true"], 64),
        (["model.fp8=delayed", "parallel.tensor=3"], 48),
    ],
)
def test_lengths_are_filled_up_for_tensor_parallel_ranks_and_fp8(overrides: list[str], multiple: int) -> None:
    """With sequence parallelism each rank's part of a sequence has the rows that FP8 needs."""
    made = objective(32, *overrides)
    batch = made.batch([made.sample(item(0, 32), "train/0")], [0])
    assert batch.source_BL is not None
    assert length_multiple(made.config) == multiple
    assert batch.source_BL.shape[1] % multiple == batch.tokens_BS.shape[1] % multiple == 0


def test_reserved_sentinels_are_used_if_there_are_enough() -> None:
    config = tiny(*BOTH, "data.sequence_length=32")  # 5 tokens in 2 spans
    options = SpanCorruption.Config()
    for reserved, added, expected in ((2, 0, (30, 31)), (1, 2, (WORDS, WORDS + 1))):
        special = SpecialTokens({f"<extra_id_{number}>": 30 + number for number in range(reserved)})
        data = Vocabulary(WORDS, EOD, None, special)
        assert SpanCorruption.added_ids(options, config, data) == added
        made = SpanCorruption(options, config, data.with_added(added))
        assert tuple(made.sentinels) == expected
