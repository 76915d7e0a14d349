"""Log-likelihoods of questions: those of the perplexity, whatever batches and ranks they are divided into."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.apps.evaluation.perplexity import perplexity_on
from megamoe.apps.evaluation.trained_model import TrainedModel, session
from megamoe.apps.generation.generate import tokenizer_of
from megamoe.apps.generation.runner import leave_capacity_out, neighbours
from megamoe.apps.lm_eval.scoring import Question, answers
from megamoe.errors import UserError
from megamoe.moe.context import MicroBatch
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import trained_on_bytes

LONGEST = 32
THRESHOLD = {"moe__router": {"selector": {"name": "threshold", "threshold": 0.4}}}
HASH = {"model__position": "learned", "moe__router": "hash", "moe__losses": {}}
CAPACITY = {
    "moe__router": {
        "selector": {"name": "top_k", "k": 2},
        "capacity": {"name": "per_expert", "factor": 0.5, "eval_factor": 0.5},
    }
}
TEXTS = ["a cat", "the quick brown fox jumps over", "o", "the quick brown", "lorem ipsum dolor sit amet."]


@pytest.fixture(scope="module")
def runs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("scored")
    models: dict[str, dict[str, Any]] = {"threshold": THRESHOLD, "hash": HASH, "capacity": CAPACITY}
    pool.run(trained_on_bytes, folder, models, ranks=1)
    return folder


def questions(trained: TrainedModel) -> list[Question]:
    """Each text after the end of a document; and its second half after the first."""
    whole = [list(text.encode()) for text in TEXTS]
    found = [Question([tokenizer_of(trained).eod], tokens) for tokens in whole]
    return found + [
        Question(tokens[: len(tokens) // 2 + 1], tokens[len(tokens) // 2 + 1 :]) for tokens in whole
    ]


def by_perplexity(trained: TrainedModel, question: Question) -> float:
    """The oracle: our cross entropy of the one sequence, summed over the continuation."""
    tokens = torch.tensor([*question.context, *question.continuation])
    mask = (torch.arange(len(tokens) - 1) >= len(question.context) - 1).float()
    item = {
        "tokens": tokens[:-1],
        "labels": tokens[1:],
        "position_ids": torch.arange(len(tokens) - 1),
        "loss_mask": mask,
    }
    found = perplexity_on(trained, [item], 1)
    return -found.lm_loss * found.tokens


def against_the_oracle(folder: Path, keep_capacity: bool) -> dict[str, float]:
    """Job: the largest difference for a token by run."""
    found = {}
    with session(["train.micro_batch_size=1"]) as ranks:
        for name in ("threshold", "hash", "capacity"):
            trained = ranks.open(folder / name)
            if not keep_capacity:
                leave_capacity_out(trained)
            size = 1 if neighbours(trained) else 3
            asked = [each for each in questions(trained) if each.continuation]
            given = answers(trained, asked, size, LONGEST)
            found[name] = max(
                abs(answer.log_likelihood - by_perplexity(trained, each)) / len(each.continuation)
                for answer, each in zip(given, asked, strict=True)
            )
    return found


@pytest.mark.parametrize(
    "keep_capacity", [pytest.param(False, marks=[pytest.mark.full]), True], ids=["dropless", "capacity"]
)
def test_log_likelihoods_are_those_of_the_perplexity(pool: Pool, runs: Path, keep_capacity: bool) -> None:
    (found,) = pool.run(against_the_oracle, runs, keep_capacity, ranks=1)
    assert max(found.values()) < 1e-6, found


def all_answers(folder: Path, size: int, *overrides: str) -> list[tuple[float, bool]]:
    """Job: the answers of two models, the router's capacity left out."""
    given: list[tuple[float, bool]] = []
    with session(overrides) as ranks:
        for name in ("threshold", "capacity"):
            trained = ranks.open(folder / name)
            leave_capacity_out(trained)
            given += answers(trained, questions(trained), size, LONGEST)
    return given


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "ranks", "overrides"),
    [
        (1, 1, []),
        (16, 1, []),
        (2, 2, []),
        (3, 2, ["parallel.expert=2"]),
        (3, 2, ["parallel.tensor=2"]),
        (4, 4, ["parallel.tensor=2", "parallel.expert=2"]),
    ],
)
def test_batches_and_ranks_make_no_difference(
    pool: Pool, runs: Path, size: int, ranks: int, overrides: list[str]
) -> None:
    (expected,) = pool.run(all_answers, runs, 3, ranks=1)
    for found in pool.run(all_answers, runs, size, *overrides, ranks=ranks):
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        for (value, _), (other, _) in zip(found, expected, strict=True):
            assert value == pytest.approx(other, abs=2e-5)


def greedy_and_cut(folder: Path) -> None:
    """Job: what a greedy answer is, what is cut, and what is refused."""
    with session() as ranks:
        trained = ranks.open(folder / "hash")
        context: list[int] = [7, 8, 9]
        continuation: list[int] = []
        for _ in range(4):
            tokens_BS = torch.tensor([context + continuation])
            with torch.no_grad():
                trained.context.batch = MicroBatch(token_ids_T=tokens_BS[0])
                logits_BSV = trained.decoder.whole_logits(tokens_BS, torch.arange(tokens_BS.shape[1])[None])
            continuation.append(int(logits_BSV[0, -1, : trained.vocabulary.size].argmax()))
        other = [*continuation[:-1], (continuation[-1] + 1) % 256]
        asked = [Question(context, continuation), Question(context, other)]
        assert [answer.is_greedy for answer in answers(trained, asked, 2, LONGEST)] == [True, False]
        long = Question([3] * 50 + [7, 8, 9], continuation)
        cut = Question([3] * (LONGEST + 1 - 3 - 4) + [7, 8, 9], continuation)
        one, same = answers(trained, [long, cut], 2, LONGEST)
        assert one == same
        with pytest.raises(UserError, match="a continuation has 33 tokens, but the model reads 32"):
            answers(trained, [Question([1], [2] * 33)], 1, LONGEST)


def test_greedy_answers_and_long_questions(pool: Pool, runs: Path) -> None:
    pool.run(greedy_and_cut, runs, ranks=1)
