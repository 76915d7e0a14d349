"""The task file: every key of its YAML, its default and its meaning, and the kinds of tasks."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from megamoe.config.files import read_run
from megamoe.config.load import apply_override
from megamoe.config.messages import problems_of
from megamoe.config.parts import STRICT
from megamoe.config.schema import PathText
from megamoe.config.values import (
    Decay,
    Fraction,
    Length,
    PositiveFloat,
    PositiveInt,
    Rate,
    Seed,
    Size,
    is_run_name,
)
from megamoe.errors import UserError

# Of all metrics more is better. The first two of a kind are taken if a task names none.
OF_LABELS = ("accuracy", "f1_macro", "f1_micro", "f1_weighted", "f1_binary", "matthews")
SECOND = ("second",)  # the column of a pair's other text


@dataclass(frozen=True)
class TaskKind:
    """A kind of task.

    objective: the name of its training objective. predicts: `model.predicts`. columns, optional: what a row
    has. metrics: those that it may be scored by. outputs: those of the head; None: one for each label.
    """

    objective: str
    predicts: Literal["label", "number", "tags", "span"]
    columns: tuple[str, ...]
    metrics: tuple[str, ...]
    optional: tuple[str, ...] = ()
    outputs: int | None = None

    @property
    def has_labels(self) -> bool:
        """Whether its labels have names."""
        return self.outputs is None


TEXT, WORDS, QUESTION = ("text", "label"), ("words", "tags"), ("question", "context", "answers")
KINDS = {
    "classification": TaskKind("classification", "label", TEXT, OF_LABELS, SECOND),
    "regression": TaskKind("regression", "number", TEXT, ("pearson", "spearman"), SECOND, outputs=1),
    "tagging": TaskKind("tagging", "tags", WORDS, OF_LABELS),
    "question_answering": TaskKind("span", "span", QUESTION, ("exact_match", "f1"), outputs=2),
}


PREFIX = "task."  # of overrides that change the task, not the run
VALID = "valid"  # the name of the validation set among the results
SET_NAME = re.compile(r"[\w.\-]{1,80}")


@dataclass
class Task:
    """A task: its data, and how a model is tuned to it. Files are JSON lines (.jsonl), .tsv or .csv.

    A task file may have a `base`, as a run's (`config.files`).
    """

    __pydantic_config__ = STRICT
    name: Annotated[str, AfterValidator(is_run_name)]
    kind: Literal["classification", "regression", "tagging", "question_answering"]
    train: PathText
    test: PathText | dict[str, PathText]  # files by name, such as languages; or one path with a `*`: the name
    valid: PathText | None = None
    languages: list[str] | None = None  # of a path with a `*`: the names to take; default: all
    columns: dict[str, str] = field(default_factory=dict)  # the file's column of each of the kind's
    labels: list[str] | None = None  # in the order of their numbers; default: those of train, sorted
    metrics: list[str] | None = None  # default: the kind's first ones
    positive: str | None = None  # the label of which f1_binary is the F1
    seeds: Annotated[list[Seed], Field(min_length=1)] = field(default_factory=lambda: [1])
    epochs: PositiveFloat = 3.0
    batch_size: PositiveInt = 32  # examples of an optimiser step, over all ranks
    micro_batch_size: Size | None = None  # examples of a rank and pass; default: as many as a batch has
    learning_rate: Rate = 2e-5
    schedule: Literal["cosine", "linear", "inverse_sqrt", "wsd", "constant"] = "linear"
    warmup_share: Fraction = 0.1
    weight_decay: Decay = 0.0
    dropout: Fraction = 0.1  # on attention weights and on what a block adds to its residual
    frozen: list[Literal["router", "experts"]] = field(default_factory=list)  # of an MoE model
    too_long: Literal["error", "truncate"] = "error"
    sequence_length: Length | None = None  # tokens; default: as in pretraining
    longest_answer: PositiveInt = 30  # tokens, of question_answering
    tokenizer: PathText | None = None  # default: that of the pretraining data
    select: Literal["last", "best"] = "last"  # the epoch: the last, or the best on valid by the first metric
    evaluation_batch_size: Size = 32  # examples of a pass
    run: dict[str, Any] = field(default_factory=dict)  # further keys of the runs, such as optimizer.beta2

    @property
    def kind_of_task(self) -> TaskKind:
        """What its kind has."""
        return KINDS[self.kind]

    @property
    def metric_names(self) -> list[str]:
        """The metrics, the one by which an epoch is selected first."""
        return self.metrics if self.metrics is not None else list(self.kind_of_task.metrics[:2])


_TASK = TypeAdapter(Task)


def load_task(path: Path, overrides: list[str]) -> Task:
    """Read a task file, and apply overrides `task.key=value`.

    Raises:
        UserError: for a file that cannot be read, an unknown key, or a value that does not fit.
    """
    tree = read_run(path, "--task")
    for override in overrides:
        apply_override(tree, override.removeprefix(PREFIX))
    if isinstance(labels := tree.get("labels"), list):  # in YAML, labels may be numbers
        tree["labels"] = [str(each) if type(each) is int else each for each in labels]
    try:
        task: Task = _TASK.validate_json(json.dumps(tree))
    except ValidationError as error:
        raise UserError(f"{path}: {problems_of(error, Task)[0]}") from None
    problem = _problem(task)
    if problem is not None:
        raise UserError(f"{path}: {problem}")
    return task


def _problem(task: Task) -> str | None:
    """Return what is wrong between the keys, if anything is."""
    kind, files = task.kind_of_task, [task.test] if isinstance(task.test, str) else []
    known = (*kind.columns, *kind.optional)
    for key in task.columns:
        if key not in known:
            return f"columns.{key}: {task.kind} has no such column; it has {', '.join(known)}"
    for metric in task.metric_names:
        if metric not in kind.metrics:
            return f"metrics: {metric!r} is none of {task.kind}; it has {', '.join(kind.metrics)}"
    if not task.metric_names:
        return f"metrics: found none, expected some of {', '.join(kind.metrics)}"
    if len(set(task.metric_names)) < len(task.metric_names):
        return f"metrics: found {task.metric_names}, expected each once"
    if len(set(task.seeds)) < len(task.seeds):
        return f"seeds: found {task.seeds}, expected each once"
    if task.labels is not None and not kind.has_labels:
        return f"labels: {task.kind} has none; leave them out"
    if task.labels is not None and len(set(task.labels)) < max(2, len(task.labels)):
        return f"labels: found {task.labels}, expected at least 2, each once"
    if task.labels is not None and not all(label.strip() for label in task.labels):
        return f"labels: found {task.labels}, of which one is empty; give it a name"
    if ("f1_binary" in task.metric_names) != (task.positive is not None):
        return "positive: the label of which f1_binary is the F1; give both, or neither"
    if task.select == "best" and task.valid is None:
        return "select: best needs a valid file; give valid, or select: last"
    if any("*" not in file for file in files):
        return f"test: found {task.test!r}, expected files by name, {{en: ...}}, or a path with a *"
    if not files and task.languages is not None:
        return "languages: are for a test path with a *; leave them out"
    for name in () if isinstance(task.test, str) else task.test:
        if not SET_NAME.fullmatch(name):
            return f"test: the name {name!r} has other characters than letters, digits and _.-"
        if name == VALID:
            return f"test: {name!r} is the name of the validation set; choose another name"
    if task.test == {}:
        return "test: names no file; expected files by name, {en: ...}"
    return None
