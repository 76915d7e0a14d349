"""The kinds of tasks: their columns, their training objective, their metrics."""

from dataclasses import dataclass
from typing import Literal

# Of all metrics more is better.
OF_LABELS = ("accuracy", "f1_macro", "f1_micro", "f1_weighted", "f1_binary", "matthews")


@dataclass(frozen=True)
class Kind:
    """A kind of task.

    objective: the name of its training objective. predicts: `model.predicts`. columns, optional: what a row
    has. metrics: those that it may be scored by. default_metrics: those that are taken if none are named.
    has_labels: whether its labels have names. outputs: those of the head; None: one for each label.
    """

    objective: str
    predicts: Literal["label", "number", "tags", "span"]
    columns: tuple[str, ...]
    metrics: tuple[str, ...]
    default_metrics: tuple[str, ...]
    optional: tuple[str, ...] = ()
    has_labels: bool = False
    outputs: int | None = None


KINDS = {
    "classification": Kind(
        "classification",
        "label",
        ("text", "label"),
        OF_LABELS,
        ("accuracy", "f1_macro"),
        optional=("second",),
        has_labels=True,
    ),
    "regression": Kind(
        "regression",
        "number",
        ("text", "label"),
        ("pearson", "spearman"),
        ("pearson", "spearman"),
        optional=("second",),
        outputs=1,
    ),
    "tagging": Kind(
        "tagging", "tags", ("words", "tags"), OF_LABELS, ("accuracy", "f1_macro"), has_labels=True
    ),
    "question_answering": Kind(
        "span",
        "span",
        ("question", "context", "answers"),
        ("exact_match", "f1"),
        ("exact_match", "f1"),
        outputs=2,
    ),
}
