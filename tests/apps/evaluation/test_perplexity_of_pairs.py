"""An encoder-decoder's loss by tools/evaluate.py is the one that training reports, padding included."""

from pathlib import Path
from typing import Any

import pytest

from tests.apps.evaluation.test_perplexity import evaluated, trained_run
from tests.support.data.pairs import make_pairs
from tests.support.ranks.pool import Pool

BOTH: dict[str, Any] = {
    "model__architecture": "encoder_decoder",
    "data__document_aware": False,
    "moe__layers": {"encoder": {"at": [2]}, "decoder": {"at": [1], "insert_after": [2]}},
    "moe__num_shared_experts": 0,
    "train__label_smoothing": 0.1,
    "train__micro_batch_size": 2,
    "train__global_batch_size": 8,
    "evaluation__batches": 2,
}
SETS = ("valid", "en-it")


def pair_run(pairs: Path) -> dict[str, Any]:
    return {
        **BOTH,
        "model__vocab_size": None,
        "data__mock": False,
        "data__sources": [{"path": str(pairs / "train")}],
        "data__split": [0.8, 0.2, 0],
        "data__sequence_length": 40,
        "train__objective": {"name": "translation", "bucket": 4, "validate": ["en-it"]},
    }


@pytest.fixture(name="run", scope="module")
def _run(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run that learns to translate, and its validation losses on the sets."""
    folder = tmp_path_factory.mktemp("translated")
    (reported,) = pool.run(trained_run, folder, **pair_run(make_pairs(folder, [0.8, 0.2, 0])), ranks=1)
    losses = [reported[name] for name in ("val/lm_loss", "val/en-it/lm_loss")]
    assert losses[0] != losses[1]
    return folder / "small", losses


def test_translation(pool: Pool, run: tuple[Path, list[float]]) -> None:
    """Each token takes 2 experts, of FFN size 32, in place of a dense FFN of 64."""
    path, losses = run
    (alone,) = pool.run(evaluated, path, [[]], [], SETS, ranks=1)
    for found, reported in zip(alone, losses, strict=True):
        assert found["lm_loss"] == pytest.approx(reported, abs=1e-6)
        assert (found["experts_per_token"], found["dense_share"]) == (2, 1.0)


@pytest.mark.full
def test_translation_on_two_ranks(pool: Pool, run: tuple[Path, list[float]]) -> None:
    path, losses = run
    found, _ = pool.run(evaluated, path, [[]], ["parallel.expert=2"], SETS, ranks=2)
    assert [each["lm_loss"] for each in found] == pytest.approx(losses, abs=1e-6)
