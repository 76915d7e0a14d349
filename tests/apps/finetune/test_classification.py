"""Classification: loss against plain PyTorch, order of texts, validation sets, refusals in one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.config import RunConfig, to_dict
from megamoe.data.batches import Batch
from megamoe.errors import UserError
from megamoe.model.architectures.encoder import Encoder
from megamoe.model.heads.labels import Classifier
from megamoe.model.size import model_flops
from megamoe.moe.part import StepContext
from megamoe.train.micro_batch import micro_batch_of
from megamoe.train.objective import token_shares
from megamoe.train.resolved import ResolvedRun, resolve_run
from megamoe.train.resume import check_resume
from megamoe.train.step import evaluate, model_inputs
from tests.support.checkpoint_files import write_checkpoint
from tests.support.data.labelled import labelled_config, make_labels, write
from tests.support.data.sources import stream, take
from tests.support.refusals import Case, cases, told
from tests.support.tiny import tiny_engine

END = 256


@pytest.fixture(name="labels", scope="module")
def _labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_labels(tmp_path_factory.mktemp("classification"))


def config_of(labels: Path, *overrides: str, **options: Any) -> RunConfig:
    return labelled_config(labels / "train.jsonl", {"name": "classification", **options}, 3, *overrides)


def batches_of(
    run: ResolvedRun, count: int, name: str = "train", start: int = 0, ranks: int = 1
) -> list[Batch]:
    """The batches of the last of so many ranks."""
    sets = run.objective.datasets(1000, 16)
    dataset = sets.train if name == "train" else sets.validation[name]
    return take(stream(dataset, 2, start, ranks - 1, ranks, make_batch=run.objective.batch), count)


def texts(batches: list[Batch]) -> list[tuple[tuple[int, ...], int]]:
    """The tokens without padding and the label of each text that has a loss."""
    found = []
    for batch in batches:
        assert batch.lengths_B is not None
        for row, length in enumerate(batch.lengths_B.tolist()):
            assert batch.loss_mask_BS[row, 1:].sum() == 0
            if batch.loss_mask_BS[row, 0]:
                tokens = tuple(batch.tokens_BS[row, :length].tolist())
                found.append((tokens, int(batch.labels_BS[row, 0])))
    return found


def test_texts_come_once_an_epoch_in_an_order_that_ranks_and_resumes_share(labels: Path) -> None:
    run = resolve_run(config_of(labels), 1)
    lines = [json.loads(line) for line in (labels / "train.jsonl").read_text().splitlines()]
    expected = [
        ((END, *each["text"].encode(), END), ["a_words", "b_words"].index(each["label"])) for each in lines
    ]
    two_epochs = texts(batches_of(run, 37))
    assert sorted(two_epochs[:37]) == sorted(two_epochs[37:]) == sorted(expected)
    assert len({tuple(each) for each in (two_epochs[:37], two_epochs[37:], expected)}) == 3
    assert texts(batches_of(run, 3, start=10)) == two_epochs[10:16]
    assert texts(batches_of(run, 2, start=10, ranks=2)) == two_epochs[12:14] + two_epochs[16:18]
    other = resolve_run(config_of(labels, "seed=7"), 1)
    assert texts(batches_of(other, 37)) != two_epochs


def test_a_text_of_a_validation_set_counts_once(labels: Path) -> None:
    run = resolve_run(
        config_of(labels, f"data.validation={{more: [{labels / 'test.de.jsonl'}]}}", languages=["all"]), 1
    )
    assert list(run.objective.datasets(8, 8).validation) == ["valid", "de", "en", "more"]
    for name, size in (("valid", 11), ("en", 5), ("de", 13)):
        found = texts(batches_of(run, 8, name))
        assert len(found) == size == len(found)
    assert not run.objective.datasets(8, 0).validation
    without = resolve_run(config_of(labels, "data.split=[1, 0, 0]", languages=["de"]), 1)
    assert list(without.objective.datasets(8, 8).validation) == ["de"]


@pytest.mark.usefixtures("one_rank")
def test_accuracy_is_the_share_of_right_labels(labels: Path) -> None:
    """Over the texts of a set, whatever stands behind the last one."""
    config = config_of(labels, "model.vocab_size=257", "model.vocab_multiple=1")
    run = resolve_run(config, 1)
    context = StepContext(seed=4, step=1)
    engine = tiny_engine(config, context, vocab_size=257)
    model = engine.model
    assert isinstance(model, Encoder) and isinstance(model.head, Classifier)
    torch.nn.init.normal_(model.head.output.weight, std=5.0)
    batches = batches_of(run, 8, "valid")
    found = evaluate(engine, context, batches, run.objective)
    right, losses = 0, 0.0
    engine.train(False)
    for number, batch in enumerate(batches):
        context.batch = micro_batch_of(batch, number)
        with torch.no_grad():
            losses += float(model(**model_inputs(batch))[:, 0] @ batch.loss_mask_BS[:, 0])
        logits_BC = model.label_logits()
        assert logits_BC is not None
        for row in range(2):
            if batch.loss_mask_BS[row, 0]:
                right += int(logits_BC[row].argmax()) == int(batch.labels_BS[row, 0])
    assert found == pytest.approx({"lm_loss": losses / 11, "accuracy": right / 11}, rel=1e-6)
    assert 0 < right < 11


@pytest.mark.parametrize("case", [*cases("finetune", "run: "), *cases("finetune", "file: ")])
def test_refusals(labels: Path, tmp_path: Path, case: Case, expect_message: Callable[..., None]) -> None:
    folder = Path(shutil.copytree(labels, tmp_path / "labels"))
    if "file" in case.row:
        (folder / case["file"]).write_text(case["text"])
    overrides = [each.replace("FOLDER", str(folder)) for each in case.row.get("overrides", ())]
    options = case.row.get("options", {})
    expect_message(case, told(lambda: resolve_run(config_of(folder, *overrides, **options), 1), folder))


def test_the_number_of_labels_is_kept_and_checked_on_resume(labels: Path, tmp_path: Path) -> None:
    config = config_of(labels)
    saved = write_checkpoint(tmp_path / "step_00000005", {}, vocabulary=257, config=to_dict(config))
    with pytest.raises(UserError, match="saved with model.num_labels 3, this run has 4; resume with"):
        check_resume(config_of(labels, "model.num_labels=4"), 257, saved)


def test_texts_that_are_too_long_can_be_cut(labels: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(labels, tmp_path / "labels"))
    write(folder / "train.jsonl", [("abcdefghij", "unused"), ("a", "a_words")])
    config = config_of(folder, "data.sequence_length=8", "data.split=[1, 0, 0]", too_long="truncate")
    found = texts(batches_of(resolve_run(config, 1), 1))
    assert set(found) == {((END, *b"a", END), 0), ((END, *b"abcdef", END), 2)}
    flops, pooled = (
        model_flops(config_of(folder, "data.split=[1, 0, 0]", f"model.pooler={pooler}"), 257)
        for pooler in ("false", "true")
    )
    assert pooled.token - flops.token == pytest.approx(6 * 16 * 16 / 32)
    shares = token_shares(config)
    assert shares.predicted == 0 and shares.stacks["encoder"] == pytest.approx((3 + 8) / 2 / 8)
