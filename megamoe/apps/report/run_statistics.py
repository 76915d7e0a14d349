"""Summary statistics of a run, computed from its metrics, and the table that compares runs."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megamoe.apps.command import aligned
from megamoe.apps.report.record import read_metrics
from megamoe.config.yaml_text import parse_yaml
from megamoe.errors import UserError
from megamoe.io import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, read_json, read_plain, real, reason
from megamoe.metrics import names
from megamoe.metrics.formats import format_count, format_number, readable
from megamoe.redaction import redact

Rows = list[dict[str, Any]]
FURTHER_LOSS = names.keys_like(names.SET_LM_LOSS)
LARGEST_SUMMARY, LARGEST_CONFIG = 1 << 20, 1 << 24  # bytes
COMPARED = [
    "run", "parameters", "active", "steps", "tokens", "first val", "last val", "fall %", "perplexity",
    "tok/s", "imbalance", "dropped %",
]  # fmt: skip


@dataclass
class Run:
    """The content of a run folder: the records of metrics.jsonl, summary.json and config.yaml.

    config: the values by dotted keys, lists whole; empty if the file is missing or is no mapping.
    """

    folder: Path
    rows: Rows
    summary: dict[str, Any]
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return real(self.folder).name

    @cached_property
    def statistics(self) -> "RunStatistics":
        """The statistics of the records, computed once."""
        return compute_statistics(self.rows)

    @cached_property
    def layers(self) -> list[str]:
        """The MoE layers of the records, found once."""
        return moe_layers(self.rows)


@dataclass
class RunStatistics:
    """Summary statistics of a run; None where nothing was recorded.

    val_set: the further validation set that the val_loss_* are of, where the run has no main set; None: they
    are of the main set.
    """

    steps: int
    tokens: int | None
    time_s: float | None  # in steps; pauses between launches do not count
    train_loss: float | None  # the last one
    val_set: str | None
    val_loss_first: float | None
    val_loss_last: float | None
    val_loss_best: float | None
    further_val_losses: dict[str, float]  # the last of each further set, by name
    tokens_per_s: float | None  # median
    max_imbalance: float | None  # of all MoE layers, at the last step that recorded it
    max_dropped: float | None  # likewise: the share of pairs that the capacity dropped, which no load counts
    never_used: dict[str, list[int]]  # layer -> experts that received nothing in any recorded step

    @property
    def of_set(self) -> str:
        """The name of the validation set, to stand behind a label; nothing for the main one."""
        return "" if self.val_set is None else f" ({readable(self.val_set, 30)})"

    @property
    def perplexity(self) -> float | None:
        """The exponential of the last validation loss."""
        if self.val_loss_last is None:
            return None
        return math.inf if self.val_loss_last > 700 else math.exp(self.val_loss_last)

    @property
    def val_fall_percent(self) -> float | None:
        """The fall of the validation loss from its first to its last value, in percent."""
        if self.val_loss_first is None or self.val_loss_last is None or self.val_loss_first == 0:
            return None
        return 100.0 * (self.val_loss_first - self.val_loss_last) / self.val_loss_first


def read_run(folder: Path) -> Run:
    """Read a run folder. A run that has recorded nothing yet, but has a config.yaml, has no rows.

    Raises:
        UserError: if the folder or its metrics are missing or cannot be read.
    """
    try:
        is_folder = folder.is_dir()
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({reason(error)}); name a run's folder") from None
    if not is_folder:
        raise UserError(f"{folder}: no such run folder; expected the folder of a run, such as runs/<name>")
    path, text = folder / METRICS_FILE, _config_text(folder / CONFIG_FILE)
    begun = text and not path.exists() and not path.is_symlink()
    rows = [] if begun else read_metrics(path)
    if not rows and not text:
        raise UserError(
            f"{path}: no metrics in it, and no {CONFIG_FILE} beside it; expected the folder of a run"
        )
    return Run(folder, rows, _read_summary(folder / SUMMARY_FILE), text, _flat_config(text))


def _config_text(path: Path) -> str:
    """Return the resolved configuration; empty if the file is missing or not one that a run writes."""
    try:
        return redact(read_plain(path, LARGEST_CONFIG).decode("utf-8", errors="replace").rstrip())
    except (OSError, ValueError):
        return ""


def _flat_config(text: str) -> dict[str, Any]:
    try:
        tree = parse_yaml(text)
    except yaml.YAMLError:
        return {}
    return dict(_leaves(tree, "")) if isinstance(tree, dict) else {}


def _leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict) or not tree:
        yield prefix, tree
        return
    for key, value in tree.items():
        yield from _leaves(value, f"{prefix}.{key}" if prefix else key)


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        summary = read_json(path, LARGEST_SUMMARY)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    except ValueError as error:
        raise UserError(f"{path}: no valid JSON ({error}); remove the file to go without it") from None
    if not isinstance(summary, dict):
        return {}
    for key in ("parameters_total", "parameters_active", "steps"):
        value = summary.get(key)
        if value is not None and not (type(value) is int and 0 <= value < 1 << 63):
            raise UserError(
                f"{path}: {key} is {str(value)[:40]!r}, expected a number of at least 0; remove the file to "
                "go without it"
            )
    return summary


def series(rows: Rows, key: str, x: str = names.STEP) -> tuple[list[int], list[Any]]:
    """Return the values of `x` in the rows that recorded both, and the values of `key`."""
    recorded = [(row[x], row[key]) for row in rows if row.get(key) is not None and row.get(x) is not None]
    return [at for at, _ in recorded], [value for _, value in recorded]


def moe_layers(rows: Rows) -> list[str]:
    """Return the MoE layers of the record (`layer_02`, ...), in the order of the blocks."""
    found = {of[1] for key in recorded(rows) if (of := names.IN_LAYER.fullmatch(key)) and of[2] == names.LOAD}
    return sorted(found, key=lambda name: (len(name), name))


def further_sets(rows: Rows) -> list[str]:
    """Return the validation sets other than the main one."""
    return sorted(of[1] for key in recorded(rows) if (of := FURTHER_LOSS.fullmatch(key)))


def recorded(rows: Rows) -> set[str]:
    """Return the keys that have a value."""
    return {key for row in rows for key, value in row.items() if value is not None}


def compute_statistics(rows: Rows) -> RunStatistics:
    """Compute the statistics of a run's records."""

    def last(key: str) -> Any:
        return (series(rows, key)[1] or [None])[-1]

    val_key = names.validation_key(recorded(rows)) or names.VAL_LM_LOSS
    val_losses = series(rows, val_key)[1]
    val_set = FURTHER_LOSS.fullmatch(val_key)
    speeds = series(rows, names.TOKENS_PER_S)[1]
    return RunStatistics(
        steps=rows[-1][names.STEP] if rows else 0,
        tokens=last(names.TOKENS),
        time_s=_time_in_steps(rows),
        train_loss=last(names.LM_LOSS),
        val_set=None if val_set is None else val_set[1],
        val_loss_first=val_losses[0] if val_losses else None,
        val_loss_last=last(val_key),
        val_loss_best=min(val_losses, default=None),
        further_val_losses={name: last(names.fill(names.SET_LM_LOSS, name)) for name in further_sets(rows)},
        tokens_per_s=statistics.median(speeds) if speeds else None,
        max_imbalance=_last_of_layers(rows, names.IMBALANCE),
        max_dropped=_last_of_layers(rows, names.DROPPED),
        never_used=_never_used(rows),
    )


def _last_of_layers(rows: Rows, name: str) -> float | None:
    values = (names.worst_of_layers(row, name) for row in reversed(rows))
    return next((value for value in values if value is not None), None)


def _time_in_steps(rows: Rows) -> float | None:
    """Sum the time of all steps: each record counts for the steps since the record before it."""
    steps, seconds = series(rows, names.STEP_S)
    spans = [(step - before) * s for step, before, s in zip(steps, [0, *steps], seconds, strict=False)]
    return sum(spans) if spans else None


def _never_used(rows: Rows) -> dict[str, list[int]]:
    never_used = {}
    for layer in moe_layers(rows):
        loads = series(rows, names.of_layer(layer)[names.LOAD])[1]
        idle = np.flatnonzero(~np.asarray(loads, dtype=float).any(axis=0))
        if len(idle):
            never_used[layer] = idle.tolist()
    return never_used


def comparison_table(runs: list[Run]) -> str:
    """Return a plain-text table with a line for each run; `-` where a run has not recorded a value."""
    return aligned([COMPARED, *(comparison_row(run) for run in runs)])


def comparison_row(run: Run) -> list[str]:
    """Return the cells of a run under COMPARED; `-` where it has not recorded a value."""
    stats = run.statistics
    sizes = (run.summary.get(key) for key in ("parameters_total", "parameters_active"))
    values = [
        (stats.steps, "{}"),
        (stats.tokens, "{:,}"),
        (stats.val_loss_first, "{:.4f}"),
        (stats.val_loss_last, "{:.4f}"),
        (stats.val_fall_percent, "{:.2f}"),
        (stats.perplexity, "{:,.2f}"),
        (stats.tokens_per_s, "{:,.0f}"),
        (stats.max_imbalance, "{:.2f}"),
        (None if stats.max_dropped is None else 100 * stats.max_dropped, "{:.1f}"),
    ]
    cells = ["-" if value is None else format_number(value, pattern) for value, pattern in values]
    for place in (2, 3):
        cells[place] += stats.of_set if cells[place] != "-" else ""
    return [run.name, *("-" if size is None else format_count(size) for size in sizes), *cells]
