"""What each rank of a compared run does: train, save after the first step, resume, and save at the end."""

import gc
import re
from pathlib import Path
from typing import Any

import torch

from megamoe.config import parse_config
from megamoe.metrics import names
from megamoe.registry import load_plugin
from megamoe.train.trainer import Trainer

# Their values depend on the layout or on the clock.
NOT_COMPARED = re.compile(rf"{names.TIME}|perf/|system/|.*/rank_|attention/clipped")


Metrics = list[dict[str, list[float]]]


def train(tree: dict[str, Any], resumes: bool, noise: float) -> Metrics:
    """Return the metrics of each step, and after the last those of an evaluation.

    resumes: whether the run ends after its first checkpoint and another goes on from there. noise: relative
    standard deviation of what the initial weights are changed by.
    """
    for plugin in tree["plugins"]:
        load_plugin(plugin)
    folder = Path(tree["output"]) / tree["name"] / "checkpoints"
    trainer = Trainer(parse_config(tree))
    if noise:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.mul_((1 + noise * drawn).to(parameter))
    found, steps = [], tree["train"]["steps"]
    for step in range(1, steps + 1):
        _, metrics = trainer.step()
        found.append(metrics)
        if step in (1, steps):
            trainer.save()
        if resumes and step == 1:
            trainer.release()
            del trainer
            gc.collect()  # an engine and its parameters refer to each other
            resume = {**tree["checkpoint"], "resume": str(folder / f"step_{step:08d}")}
            trainer = Trainer(parse_config({**tree, "checkpoint": resume}))
    found.append(trainer.evaluate())
    trainer.release()
    del trainer
    gc.collect()
    return [_compared(metrics) for metrics in found]


def _compared(metrics: dict[str, Any]) -> dict[str, list[float]]:
    """Return the metrics that every layout must show alike, each as a list."""
    listed = {key: value if isinstance(value, list) else [value] for key, value in metrics.items()}
    return {
        key: [float(number) for number in value]
        for key, value in listed.items()
        if not NOT_COMPARED.match(key) and all(isinstance(number, int | float) for number in value)
    }
