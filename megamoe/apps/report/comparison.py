"""Sets runs side by side: groups of runs that differ in their seed, curves over seeds, differing keys."""

import json
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from megamoe.apps.report.palette import nth_curve
from megamoe.apps.report.panels import Colour, Curve, Panel, Section, clipped, smooth, spike_limits, thin
from megamoe.apps.report.run_statistics import Run, further_sets, series
from megamoe.apps.report.sections import BALANCE, GATE, OPTIMISATION, RANKS, SPEED, WIDTH, axis, flat_limits
from megamoe.io import real
from megamoe.metrics import names
from megamoe.metrics.formats import format_number, readable
from megamoe.metrics.names import GRAD_NORM, TFLOPS_PER_RANK, TOKENS_PER_S

NAMES = {"name", "output", "overwrite", "differences", "checkpoint.resume"}  # say nothing about training
LONGEST_VALUE, LONGEST_LABEL = 120, 60  # characters of a differing value, of a run's name
SINGLE = {names.LM_LOSS: ("Training loss", "loss")}
SINGLE |= {key: (OPTIMISATION | SPEED)[key] for key in (GRAD_NORM, TOKENS_PER_S, TFLOPS_PER_RANK)}
ROUTING = {names.over_layers(it): drawn[:2] for it, drawn in (BALANCE | WIDTH | GATE | RANKS).items()}
REPEATED = {  # of groups of runs: the fields of their statistics, and how they are shown
    **{"val_loss_last": "{:.4f}", "val_loss_best": "{:.4f}"},
    **{"tokens_per_s": "{:,.0f}", "max_imbalance": "{:.2f}"},
}
AS_RECORDED = [names.over_layers(it) for it in (names.MAX_VIO_RUN, names.DEAD)]  # change slowly


@dataclass(frozen=True)
class Group:
    """Runs whose configurations differ in nothing but the seed, names and what is logged."""

    name: str
    runs: list[Run]


def labels_of(runs: list[Run]) -> list[str]:
    """Return the runs' names, or the ends of their paths where two have the same name."""
    names = [run.name for run in runs]
    return [
        readable(name if names.count(name) == 1 else str(real(run.folder))[-LONGEST_LABEL:], LONGEST_LABEL)
        for name, run in zip(names, runs, strict=True)
    ]


def grouped(runs: list[Run]) -> list[Group]:
    """Return the groups in the order of their first runs; a run without a configuration is alone."""
    members: dict[str, list[int]] = {}
    for at, run in enumerate(runs):
        # Runs of another seed, or that log something else, are the same experiment.
        free = {*NAMES, "seed", *(key for key in run.config if key.startswith("log."))}
        known = {key: value for key, value in run.config.items() if key not in free}
        key = json.dumps(known, sort_keys=True) if known else f"no configuration {at}"
        members.setdefault(key, []).append(at)
    labels = labels_of(runs)
    return [
        Group(_name_of([labels[at] for at in group], [runs[at] for at in group]), [runs[at] for at in group])
        for group in members.values()
    ]


def differ_in_seed(runs: list[Run]) -> bool:
    """Return whether no two of the runs have the same seed."""
    return len({run.config.get("seed") for run in runs}) == len(runs)


def _name_of(labels: list[str], runs: list[Run]) -> str:
    if len(labels) == 1:
        return labels[0]
    common = os.path.commonprefix(labels).rstrip("-_ ./") or labels[0]  # noqa: RUF071 (characters)
    return f"{common} ({len(labels)} {'seeds' if differ_in_seed(runs) else 'runs'})"


def config_differences(runs: list[Run]) -> list[list[str]]:
    """Return a row for each key whose value differs between runs: the key, and each run's value or `-`."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in NAMES)
    rows = []
    for key in keys:
        found = [run.config.get(key, "-") for run in runs]
        values = [readable(it if isinstance(it, str) else json.dumps(it), LONGEST_VALUE) for it in found]
        if len(set(values)) > 1:
            rows.append([key, *values])
    return rows


def comparison_sections(runs: list[Run]) -> list[Section]:
    """Return the sections of the metrics that at least one run has recorded."""
    groups = grouped(runs)
    sets = sorted({name for run in runs for name in further_sets(run.rows)})
    keys = {names.VAL_LM_LOSS: "Validation loss"}
    keys |= {names.fill(names.SET_LM_LOSS, name): f"Validation: {name}" for name in sets}
    loss = _panels(groups, {key: (readable(title, 40), "loss") for key, title in keys.items()})
    by_tokens = [
        replace(
            panel,
            title=f"{panel.title} by tokens",
            x="training data (tokens)",
            curves=_curves(groups, panel.keys[0], names.TOKENS, smoothed=False),
        )
        for panel in loss[:1]
    ]
    found = [
        Section("Loss", "Of the language model, without auxiliary losses.", [*loss, *by_tokens]),
        Section("Training and speed", "Each on its own scale.", _panels(groups, SINGLE)),
        Section("Routing", "Means over the MoE layers; dead experts are summed.", _panels(groups, ROUTING)),
    ]
    return [section for section in found if section.panels]


def _panels(groups: list[Group], metrics: Mapping[str, tuple[str, str]]) -> list[Panel]:
    panels = []
    for key, (title, quantity) in metrics.items():
        smooths = not (key in AS_RECORDED or key.startswith("val/"))
        curves = _curves(groups, key, names.STEP, smooths)
        if curves:
            has_band = any(curve.low is not None for curve in curves)
            values = [value for curve in curves for value in curve.y]
            limits = flat_limits(curves) if has_band else spike_limits(values)
            name = title + smooths * " (smoothed)"
            panels.append(Panel(name, axis(quantity, key), curves, (key,), limits=limits))
    return panels


def _curves(groups: list[Group], key: str, x: str, smoothed: bool) -> list[Curve]:
    curves = []
    for place, group in enumerate(groups):
        found = [series(run.rows, key, x) for run in group.runs]
        shown = [(at, smooth(values) if smoothed else clipped(values)) for at, values in found if at]
        if shown:
            curves.append(band_curve(group.name, shown, *nth_curve(place)))
    return curves


def band_curve(
    name: str, found: list[tuple[list[int], np.ndarray]], colour: Colour, dash: str = "solid"
) -> Curve:
    """Return the mean of curves at the x values that all have, with its spread.

    The spread: the lowest and the highest, which are the band, and the standard deviation of the sample.
    """
    shared = sorted(set.intersection(*(set(x) for x, _ in found)))
    if not shared:
        found, shared = found[:1], found[0][0]
    values_SR = np.stack([np.asarray(y)[np.isin(x, shared)] for x, y in found])
    x, mean = thin(shared, values_SR.mean(axis=0))
    if len(found) == 1:
        return Curve(name, x, mean, colour, points=len(x) <= 30, dash=dash)
    deviation_R = values_SR.std(axis=0, ddof=1)
    low, high, deviation = (thin(shared, it)[1] for it in (values_SR.min(0), values_SR.max(0), deviation_R))
    return Curve(name, x, mean, colour, False, len(x) <= 30, True, dash, low, high, deviation)


def seed_rows(groups: list[Group]) -> list[list[str]]:
    """Return a row for each group: its name, its runs, and the mean and deviation of their last values."""
    rows = []
    for group in groups:
        stats = [run.statistics for run in group.runs]
        cells = [_mean_and_deviation([getattr(it, key) for it in stats], REPEATED[key]) for key in REPEATED]
        rows.append([group.name, str(len(group.runs)), *cells])
    return rows


def _mean_and_deviation(values: list[float | None], pattern: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean = format_number(statistics.fmean(known), pattern)
    if len(known) < 2 or not all(map(math.isfinite, known)):
        return mean
    return f"{mean} ± {format_number(statistics.stdev(known), pattern)}"
