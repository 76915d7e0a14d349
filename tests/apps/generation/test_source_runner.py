"""Generation by encoder-decoders: with caches as by whole passes, alone as in a batch."""

import pytest
import torch

from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.apps.generation.beam_search import BeamOptions, Hypothesis
from megamoe.apps.generation.runner import Runner, leave_capacity_out
from megamoe.apps.generation.translate import translate
from tests.support.apps.encoder_decoders import DIRECTION, END, SOURCES, opened, sentences, whole_logits

pytestmark = pytest.mark.usefixtures("one_rank")

MOE = "moe.layers={encoder: {at: [2]}, decoder: {at: [1], insert_after: [2]}}"
THRESHOLD = "moe.router={selector: {name: threshold, threshold: 0.4}}"
CAPACITY = "moe.router={selector: {name: top_k, k: 2}, capacity: {name: per_expert, factor: 0.5}}"
KINDS = {
    "rope": ("model.position=rope",),
    "learned, post": ("model.position=learned", "model.norm_position=post", "model.bias=true"),
    "sinusoidal": ("model.position=sinusoidal", "model.scale_embeddings=true", "model.tie_embeddings=false"),
    "rope, post, MoE": ("model.position=rope", "model.norm_position=post", MOE, THRESHOLD),
    "sinusoidal, MoE": ("model.position=sinusoidal", MOE, CAPACITY, "moe.num_shared_experts=1"),
}
# Rows of three sources after the first step: the second source has ended, hypotheses are exchanged.
STEPS = [
    ([3, 4, 5, 6, 7, 8], [0, 0, 1, 1, 2, 2]),
    ([9, 2, 1, 3], [1, 0, 4, 4]),
    ([4, 4, 11, 5], [0, 1, 3, 2]),
    ([7], [2]),
]


@pytest.mark.parametrize("kind", KINDS)
def test_caches_give_the_logits_of_whole_passes(kind: str) -> None:
    prefix = [END] if "post" in kind else [END, 12]  # with a tag
    trained = opened(*KINDS[kind])
    leave_capacity_out(trained)
    sources = SOURCES[:3]
    cached = Runner(trained, [prefix] * 3, 8, sources=sources)
    rows = [(source, list(prefix)) for source in sources]
    found = cached.begin()
    for new, parents in [*STEPS, ([], [])]:
        wanted = torch.stack([whole_logits(trained, *row)[-1] for row in rows])
        assert wanted.std() > 0.1
        assert (found - wanted).abs().max() < 2e-5  # of logits up to 4
        if new:
            rows = [
                (rows[place][0], [*rows[place][1], token]) for place, token in zip(parents, new, strict=True)
            ]
            found = cached.feed(new, parents)


@pytest.fixture(autouse=True)
def few_further_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megamoe.apps.generation.translate.EXTRA", 4)


def best(trained: TrainedModel, size: int) -> list[list[Hypothesis]]:
    options = BeamOptions(beams=3, n_best=3)
    return translate(trained, DIRECTION, sentences(SOURCES), options, batch_size=size)


def close(one: list[list[Hypothesis]], other: list[list[Hypothesis]]) -> bool:
    """Whether hypotheses are equal, and their scores to rounding."""
    assert [[each.tokens for each in row] for row in one] == [[each.tokens for each in row] for row in other]
    scores = [[each.score for row in found for each in row] for found in (one, other)]
    return scores[0] == pytest.approx(scores[1], abs=1e-5)


@pytest.mark.parametrize("kind", ["rope", "rope, post, MoE"])
def test_a_sentence_is_translated_alone_as_in_a_batch(kind: str) -> None:
    trained = opened(*KINDS[kind])
    alone = best(trained, 1)
    assert len({len(each.tokens) for row in alone for each in row}) > 1  # they leave the batch at other times
    assert close(alone, best(trained, 3))
    assert close(alone, best(trained, 4))


def test_blank_sentences_stay_blank() -> None:
    found = translate(opened(), DIRECTION, sentences([[], [4, END], []]), BeamOptions(beams=2), max_length=3)
    assert [len(row) for row in found] == [0, 1, 0]
