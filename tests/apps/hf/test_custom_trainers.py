"""The class of our own in the trainers of others: three real steps, and back to a run of ours."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megamoe.apps.hf.import_folder import import_folder
from tests.apps.hf.test_custom import LENGTH, WORDS, exported, loaded
from tests.support.apps.hf_training import trained_beside
from tests.support.checkpoint_files import read_tensors
from tests.support.ranks.pool import Pool

pytest.importorskip("transformers")
pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_rank")]
STEPS = 3
ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "gradient_checkpointing": True,
    "save_strategy": "no",
    "disable_tqdm": True,
}


def rows() -> list[dict[str, list[int]]]:
    found = torch.randint(3, WORDS, (16, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "labels": row} for row in found]


def of_transformers(model: Any, folder: Path) -> Any:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments, default_data_collator

    arguments = TrainingArguments(str(folder), **ARGUMENTS)
    return Trainer(model, arguments, default_data_collator, train_dataset=rows())


def of_trl(model: Any, folder: Path) -> Any:
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(n): n for n in range(WORDS)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="1", eos_token="2")
    arguments = trl.SFTConfig(str(folder), max_length=LENGTH, **ARGUMENTS)
    data = Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows()])
    return trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)


@pytest.mark.parametrize("make", [of_transformers, of_trl])
@pytest.mark.parametrize("aux", [False, True])
def test_three_steps_and_back(make: Any, aux: bool, tmp_path: Path) -> None:
    model = loaded(exported(tmp_path, "switch", "moe.router.scorer=noisy"))
    model.config.output_router_logits, model.config.router_aux_loss_coef = aux, 0.01 * aux
    trainer = make(model, tmp_path / "trained")
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == STEPS and losses[-1] < losses[0] < 30
    assert ("aux_loss" in trainer.state.log_history[0]) == (aux and make is of_trl)
    trainer.save_model()
    import_folder(tmp_path / "trained", tmp_path / "run", report=lambda line: None)
    back = read_tensors(tmp_path / "run/checkpoints/step_00000000")
    trained, first = (load_file(tmp_path / each / "model.safetensors") for each in ("trained", "hf"))
    assert {name.removeprefix("model/") for name in back} == trained.keys() == first.keys()
    assert all(torch.equal(back[f"model/{name}"], tensor) for name, tensor in trained.items())
    moved = {name for name in first if not torch.equal(first[name], trained[name])}
    still = {name for name in first if "noise_weight" in name}
    assert moved | still == first.keys() and not moved & still, first.keys() - moved


def beside(folder: Path) -> dict[str, float]:
    """Job: train the class and its import side by side."""
    return trained_beside(loaded(folder / "hf"), folder)


def test_an_import_trains_as_the_class(pool: Pool, tmp_path: Path) -> None:
    exported(tmp_path, "deepseek_v3")
    (found,) = pool.run(beside, tmp_path, ranks=1, timeout_s=600)
    assert found["gradient"] < 1e-5 and found["change"] > 3e-3 and found["weights"] < 1e-4
