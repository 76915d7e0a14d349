"""docs/papers/rows.md: every command of a row of the papers' tables is accepted, without the data."""

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from megamoe.apps.finetune.task import load_task
from megamoe.config import RunConfig, load_config
from megamoe.moe.validation import check_parts

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/papers/rows.md").read_text()
ROWS = [
    re.findall(r"`([^`]+)`", line)
    for line in re.findall(r"^\|.*`(?:translate|evaluate|finetune).*\|$", PAGE, re.M)
]


def expanded(text: str) -> Iterator[list[str]]:
    """The words of each command that `<a,b>` stands for."""
    parts = re.split(r"<([^>]*)>", text)
    choices = [re.split(r",(?! )", part) if place % 2 else [part] for place, part in enumerate(parts)]
    for chosen in itertools.product(*choices):
        yield shlex.split("".join(chosen), posix=True)


def model(name: str, *overrides: str) -> RunConfig:
    own = [] if any(text.startswith("data.sources=") for text in overrides) else ["data.sources=[unread]"]
    return load_config(ROOT / f"examples/papers/{name}.yaml", [*own, *overrides])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:50])
def test_the_commands_of_a_row_are_accepted(row: list[str]) -> None:
    train, then = row
    commands = [*expanded(train)]
    configs = {tuple(words): model(*words) for words in commands}
    assert len({str(config) for config in configs.values()}) == len(commands)
    for config in configs.values():
        check_parts(config.moe, 1)
    for tool, *arguments in expanded(then):
        assert tool in ("translate", "evaluate", "finetune")
        if tool == "translate":
            assert all(config.train.objective.name == "translation" for config in configs.values())
        if tool == "finetune":
            task, *arguments = arguments
            load_task(ROOT / f"examples/tasks/{task}.yaml", [a for a in arguments if a.startswith("task.")])
            assert all(config.model.architecture == "encoder" for config in configs.values())
        for words in commands:
            model(*words, *(a for a in arguments if not a.startswith("task.")))


def test_every_model_and_task_of_the_papers_is_in_a_row() -> None:
    trained = {words[0] for train, _ in ROWS for words in expanded(train)}
    named = {path.stem for path in (ROOT / "examples/papers").glob("*.yaml")}
    assert {name for name in named if not name.endswith("_small")} <= trained
    tuned = {words[1] for _, then in ROWS for words in expanded(then) if words[0] == "finetune"}
    assert {path.stem for path in (ROOT / "examples/tasks").glob("*_*.yaml")} - {"papers_labels"} == tuned
