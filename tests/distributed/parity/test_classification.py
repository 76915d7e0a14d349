"""Fine-tuning to labels from a masked language model: first weights, layouts, resume, evaluation."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.apps.evaluation.perplexity import perplexity_on, validation_sets
from megamoe.apps.evaluation.trained_model import session
from megamoe.train.trainer import Trainer
from tests.support.checkpoint_files import assert_same_bits, read_tensors
from tests.support.data.labelled import make_labels
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import WORDS, Place, assert_same_experts, recorded_steps, small_run

STEPS = 4
MODEL: dict[str, Any] = {
    "model__architecture": "encoder",
    "model__vocab_size": 258,
    "model__num_attention_heads": 4,
    "moe__layers": {"at": [2], "insert_after": [1]},
    "data__document_aware": False,
    "data__sequence_length": 28,
    "train__micro_batch_size": 2,
    "train__global_batch_size": 8,
}
PRETRAINED = {**MODEL, "train__objective": "masked", "model__head_transform": True}
EP2 = Place(2, expert=2)
CUT = [
    Place(2, tensor=2, expert=2, sequence=True),
    Place(4, tensor=2, expert=2, zero=1),
    Place(2, expert=2, zero=3),
]


def tuned(labels: Path, **changes: Any) -> dict[str, Any]:
    return {
        **MODEL,
        "model__num_labels": 3,
        "model__pooler": True,
        "model__hidden_dropout": 0.0,
        "data__mock": False,
        "data__sources": [{"path": str(labels / "train.jsonl")}],
        "data__tokenizer": "bytes",
        "train__objective": {"name": "classification", "languages": ["de"]},
        "evaluation__batches": 2,
        **changes,
    }


def run(runs: list[dict[str, Any]], steps: int, saves: bool) -> list[dict[str, Any]]:
    """Job: what each run's start, steps and evaluation show; then a checkpoint."""
    found = []
    for changes in runs:
        with redirect_stdout(StringIO()) as said:
            trainer = Trainer(small_run(**changes))
        with trainer.engine.gathered(trainer.model.parameters()):
            start = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
        shown = {**recorded_steps(trainer, steps), **trainer.evaluate()}
        found.append({"said": said.getvalue(), "start": start, **shown})
        if saves:
            trainer.save()
        trainer.saver.checkpoints.close()
    return found


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_labels(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def alone(pool: Pool, labels: Path, tmp_path_factory: Any) -> tuple[Path, dict[str, Any], Any]:
    """A folder with `masked` and `tuned`, and what both runs showed on one rank."""
    folder = tmp_path_factory.mktemp("alone")
    masked = {**PRETRAINED, "output": folder / "masked"}
    ((before,),) = pool.run(run, [masked], 1, True, ranks=1, timeout_s=300)
    start = str(folder / "masked/small/checkpoints/step_00000001")
    changes = tuned(labels, output=folder / "tuned", checkpoint__init={"path": start})
    ((after,),) = pool.run(run, [changes], STEPS, True, ranks=1, timeout_s=300)
    return folder, before, after


def test_the_encoder_is_the_pretrained_one_and_the_head_is_new(alone: Any, labels: Path) -> None:
    folder, before, after = alone
    assert "weights from" not in before["said"]
    assert "experts: same; its head is left out, the one for labels is as drawn\n" in after["said"]
    saved = read_tensors(folder / "masked/small/checkpoints/step_00000001")
    known = {name.removeprefix("model/"): each for name, each in saved.items() if name.startswith("model/")}
    assert any(name.startswith("head.transform") for name in known)
    for name, tensor in after["start"].items():
        assert name.startswith("head.") or torch.equal(tensor, known[name]), name
    assert {name for name in after["start"] if name.startswith("head.")} == {
        f"head.{part}.{kind}" for part in ("pooler", "output") for kind in ("weight", "bias")
    }
    assert after["lm_loss"][-1] < after["lm_loss"][0]
    assert 0 <= after["val/de/accuracy"] <= 1 and (13 * after["val/de/accuracy"]) % 1 == pytest.approx(0)


def check_layouts(pool: Pool, alone: Any, labels: Path, tmp_path: Path, places: list[Place]) -> None:
    folder, _, expected = alone
    start = {"path": str(folder / "masked/small/checkpoints/step_00000001")}
    for ranks in {place.ranks for place in places}:
        mine = [place.changes(tmp_path) for place in places if place.ranks == ranks]
        runs = [tuned(labels, checkpoint__init=start, **changes) for changes in mine]
        for on_rank in zip(*pool.run(run, runs, STEPS, False, ranks=ranks, timeout_s=600), strict=True):
            for each in on_rank:
                for word in (*WORDS, "val/lm_loss", "val/de/accuracy"):
                    assert each[word] == pytest.approx(expected[word], rel=1e-5), word
            assert_same_experts(on_rank, expected)


def test_two_ranks_equal_one(pool: Pool, alone: Any, labels: Path, tmp_path: Path) -> None:
    check_layouts(pool, alone, labels, tmp_path, [EP2])


@pytest.mark.full
def test_tensor_parallelism_and_zero_equal_one_rank(
    pool: Pool, alone: Any, labels: Path, tmp_path: Path
) -> None:
    check_layouts(pool, alone, labels, tmp_path, CUT)


def evaluated(path: Path, overrides: list[str]) -> dict[str, Any]:
    """Job: what `perplexity_on` finds on the set `de`."""
    with session(overrides) as ranks:
        trained = ranks.open(path, [], ("encoder",))
        dataset = validation_sets(trained, 16)[0]["de"]
        return perplexity_on(trained, dataset, 16, "de").as_data()


def test_an_evaluation_finds_the_accuracy_of_training(pool: Pool, alone: Any) -> None:
    folder, _, expected = alone
    for found in pool.run(evaluated, folder / "tuned/small", ["parallel.expert=2"], ranks=2, timeout_s=300):
        assert found["tokens"] == 13
        assert found["accuracy"] == pytest.approx(expected["val/de/accuracy"])
        assert found["lm_loss"] == pytest.approx(expected["val/de/lm_loss"], rel=1e-5)


@pytest.mark.full
def test_resume_is_exact(pool: Pool, labels: Path, tmp_path: Path) -> None:
    """Bit for bit, with dropout and frozen experts; the head of labels is trained on."""
    layout = Place(2, expert=2, zero=3).changes(tmp_path)
    changes = tuned(labels, **layout, model__hidden_dropout=0.1, moe__frozen=["router", "experts"])
    whole, cut = ({**changes, "output": tmp_path / name} for name in ("whole", "cut"))
    again = {**cut, "checkpoint__resume": "auto"}
    expected = pool.run(run, [whole], 4, True, ranks=2, timeout_s=300)
    begun = pool.run(run, [cut], 2, True, ranks=2, timeout_s=300)
    ended = pool.run(run, [again], 2, True, ranks=2, timeout_s=300)
    for (one,), (first,), (second,) in zip(expected, begun, ended, strict=True):
        for word in (*WORDS, "samples"):
            assert first[word] + second[word] == one[word], word
        for name, tensor in second["start"].items():
            is_frozen = ".router." in name or ".experts." in name
            assert not is_frozen or torch.equal(tensor, first["start"][name]), name
            assert not name.startswith("head.output.weight") or not torch.equal(tensor, first["start"][name])
    last = "small/checkpoints/step_00000004"
    assert_same_bits(*(read_tensors(tmp_path / kind / last) for kind in ("whole", "cut")))
