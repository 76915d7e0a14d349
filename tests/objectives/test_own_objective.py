"""An objective of a plugin: that of the page, and what is said of one that is wrong."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megamoe.config import RunConfig, load_config
from megamoe.errors import UserError
from megamoe.train.resolved import resolve_run
from tests.support.data.sources import stream, take
from tests.support.tiny import BASE

PAGE = (Path(__file__).parents[2] / "docs/models/tune.md").read_text()
MADE_OF_TEXT = """
from dataclasses import dataclass
from megamoe.registry import register

@register("objective", "odd")
class Odd(BASE):
    @dataclass
    class Config:
        pass
    BODY
"""


def written(folder: Path, source: str, tree: dict[str, Any]) -> RunConfig:
    (folder / "reversed.py").write_text(source)
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return load_config(folder / "run.yaml", list(BASE))


def test_the_objective_of_the_page(own_registry: None, tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    tree = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)[-1])
    objective = resolve_run(written(tmp_path, block, tree), 1).objective
    train = objective.datasets(train_samples=4, validation_samples=4).train
    item = objective.sample({"tokens": torch.arange(8), "labels": torch.arange(1, 9)}, "train/0")
    assert item["tokens"].tolist() == [8, 7, 6, 5, 4, 3, 2, 1]
    assert item["labels"].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    assert item["loss_mask"].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert torch.equal(objective.batch([train[3]], [3]).labels_BS[0], train[3]["labels"])


def test_the_stacks_of_the_page(tmp_path: Path) -> None:
    tree = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)[0])
    assert tree["moe"]["layers"] == {"encoder": {"every": 2}, "decoder": {"insert_after": [3]}}
    config = written(tmp_path, "", {**tree, "train": {"objective": "span_corruption"}})
    assert config.model.encoder_layers == 6


OWN = "__import__('megamoe.objectives.objective', fromlist=['x']).TrainingObjective"


def odd_run(folder: Path, base: str, body: str) -> RunConfig:
    source = MADE_OF_TEXT.replace("BASE", base).replace("BODY", body)
    return written(folder, source, {"plugins": ["reversed.py"], "train": {"objective": "odd"}})


@pytest.mark.parametrize(
    ("base", "body", "message"),
    [
        ("object", "pass", "odd is no TrainingObjective"),
        (OWN, "pass", "odd: its class must set architectures, those of model.architecture that"),
        (
            OWN,
            "architectures = ('decoder',)\n    def __init__(self, *given): raise KeyError('mine')",
            "odd failed at line 11 of reversed.py: KeyError: 'mine'",
        ),
    ],
)
def test_a_wrong_objective(own_registry: None, tmp_path: Path, base: str, body: str, message: str) -> None:
    config = odd_run(tmp_path, base, body)
    with pytest.raises(UserError, match=re.escape(f"train.objective: {message}")):
        resolve_run(config, 1)


FAILURES = {
    "sample": (
        "def sample(self, item, place): return item['nothing']",
        "sample of Odd failed at line 11 of reversed.py: KeyError: 'nothing'",
    ),
    "lengths": (
        "def sample(self, item, place): return {**item, 'tokens': item['tokens'][1:]}",
        "sample of Odd failed: ValueError: sample train/0: expected one length, found {'tokens': 7,",
    ),
    "batch": (
        "def batch(self, items, indices): return 1 / 0",
        "batch of Odd failed at line 11 of reversed.py: ZeroDivisionError: division by zero",
    ),
}


@pytest.mark.parametrize("method", FAILURES)
def test_an_objective_that_fails_in_the_loader(own_registry: None, tmp_path: Path, method: str) -> None:
    body, message = FAILURES[method]
    config = odd_run(tmp_path, OWN, f"architectures = ('decoder',)\n    {body}")
    objective = resolve_run(config, 1).objective
    train = objective.datasets(train_samples=4, validation_samples=4).train
    with pytest.raises(UserError, match=re.escape(f"train.objective: {message}")):
        take(stream(train, 2, make_batch=objective.make_batch), 1)
