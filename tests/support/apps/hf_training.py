"""Jobs: train an imported model beside transformers' own with torch's AdamW; save it at any layout."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from megamoe.apps.hf.export_run import export_run
from megamoe.apps.hf.import_folder import import_folder, open_source
from megamoe.apps.hf.rules import flat
from megamoe.checkpoint.format.reader import MOMENTS, CheckpointReader, moment_name
from megamoe.config import RunConfig, load_config
from megamoe.data.batches import Batch
from megamoe.parallel import launch
from megamoe.train.trainer import Trainer
from tests.support.apps.hf_models import make
from tests.support.ranks.runs import _record_batches

STEPS, LR, BETAS, EPS, DECAY, CLIP = 3, 3e-3, (0.9, 0.95), 1e-6, 0.1, 1.0
# With the usual eps of 1e-8, a gradient as small as its rounding errors moves a weight by a whole step.
OVERRIDES = [
    "data.mock=true",
    "data.sequence_length=16",
    "data.workers=0",
    "moe.losses={}",
    f"optimizer.lr={LR}",
    "optimizer.schedule=constant",
    f"optimizer.grad_clip={CLIP}",
    f"optimizer.weight_decay={DECAY}",
    f"optimizer.eps={EPS}",
    "train.steps=3",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "evaluation.batches=0",
    "log.report=false",
]
UNMOVED = "moe.router.score_function.bias_update=1e-12"  # transformers does not move it


def continued(run: Path, output: Path, *overrides: str) -> RunConfig:
    """The run of continue.yaml, on mock data."""
    text = (run / "continue.yaml").read_text(encoding="utf-8")
    unmoved = [UNMOVED] if "bias_update" in text else []
    return load_config(run / "continue.yaml", [*OVERRIDES, *unmoved, f"output={output}", *overrides])


def trained_beside_transformers(kind: str, number: int, folder: Path) -> dict[str, float]:
    """Job: the largest differences of the gradients of the first step, and of the weights after three steps,
    with the size of the latter's change.
    """
    return trained_beside(make(kind, folder / "hf", number), folder)


def trained_beside(theirs: Any, folder: Path) -> dict[str, float]:
    """As `trained_beside_transformers`, for a model of transformers and its folder `hf`."""
    import_folder(folder / "hf", folder / "run", report=lambda line: None)
    before = all_tensors(folder / "hf")
    trainer = Trainer(continued(folder / "run", folder))
    batches: list[Batch] = []
    _record_batches(trainer, batches)
    optimizer = torch.optim.AdamW(groups_of(theirs), lr=LR, betas=BETAS, eps=EPS)
    theirs.train()
    found: dict[str, float] = {}
    try:
        for step in range(STEPS):
            batches.clear()
            trainer.step()
            step_of(theirs, batches)
            if step == 0:
                trainer.save()
                found["gradient"] = gradient_difference(folder, theirs, trainer.last_checkpoint)
            optimizer.step()
            optimizer.zero_grad()
        trainer.save()
    finally:
        trainer.close()
        launch.stop()
    export_run(folder / "run_continued", folder / "back", report=lambda line: None)
    theirs.save_pretrained(folder / "theirs")
    expected, ours = all_tensors(folder / "theirs"), all_tensors(folder / "back")
    found["weights"] = largest_difference(expected, ours)
    found["change"] = largest_difference(before, ours)
    return found


def groups_of(model: Any) -> list[dict[str, Any]]:
    """Decay for matrices alone, as here: a gate of one row is a vector, and so is each expert's bias."""
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": DECAY},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, parameter in model.named_parameters():
        is_vector = parameter.dim() < 2 or parameter.shape[0] == 1 or name.endswith("_bias")
        groups[is_vector]["params"].append(parameter)
    return groups


def step_of(model: Any, batches: list[Batch]) -> None:
    """Backward of the mean loss over all unmasked tokens, and clipping."""
    count = sum(float(batch.loss_mask_BS.sum()) for batch in batches)
    for batch in batches:
        logits_BSV = model(batch.tokens_BS).logits
        loss_BS = functional.cross_entropy(logits_BSV.transpose(1, 2), batch.labels_BS, reduction="none")
        ((loss_BS * batch.loss_mask_BS).sum() / count).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def gradient_difference(folder: Path, model: Any, checkpoint: Path | None) -> float:
    """Of the clipped gradients, which are the first moments after one step over 1 - beta1.

    The map puts the moments under the names of the folder, as it does the weights. transformers' gradients
    take the way through a saved folder, whose names differ from the modules'.
    """
    assert checkpoint is not None
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad if parameter.grad is not None else 0)
        model.save_pretrained(folder / "gradients")
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    expected = all_tensors(folder / "gradients")
    found: dict[str, Tensor] = {}
    with CheckpointReader(checkpoint) as reader:
        for rule in flat(open_source(folder / "hf").rules):
            name = moment_name(MOMENTS[0], rule.target)
            if not rule.is_buffer and name in reader.index["tensors"]:
                moment = reader.tensor(name) / (1 - BETAS[0])
                found |= {source: view.reshape(shape) for source, (view, shape) in rule.views(moment).items()}
    buffers = {name for name in expected if name.endswith(("e_score_correction_bias", "score_function.bias"))}
    return largest_difference({n: t for n, t in expected.items() if n not in buffers}, found)


def all_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder by name."""
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys(), sorted(one.keys() ^ other.keys())[:5]
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def saved_at(run: Path, output: Path, name: str, overrides: list[str]) -> None:
    """Job: start from the import at the layout of this world, and save without a step."""
    config = continued(run, output, f"name={name}", "train.global_batch_size=null", *overrides)
    trainer = Trainer(config)
    try:
        trainer.save()
    finally:
        trainer.close()
        launch.stop()
