"""The sections of the report of one run: which metrics of its record are drawn, and under which axes.

docs/metrics.md defines every metric. A metric that was not recorded has no panel.
"""

import re
from collections.abc import Mapping

import numpy as np

from megamoe.apps.report.panels import (
    LARGEST,
    Colour,
    Curve,
    HeatMap,
    Panel,
    Section,
    raw_and_smoothed,
    smooth,
    spike_limits,
    thin,
)
from megamoe.apps.report.run_statistics import Rows, further_sets, moe_layers, series
from megamoe.metrics.formats import readable

NAMED_LAYERS = 8  # more of them share a few names in the legend
MOST_BINS, FEWEST_BINS = 100, 20  # columns of a heat map
MOST_CELLS = 400_000  # of all heat maps of a section
MOST_MAPS, MOST_PANELS = 100, 30  # of a section
VALIDATION_COLOURS = ("orange", "further_0", "further_1", "further_2", "further_3")
NO_LOSS = re.compile(r"lm_loss|loss|grad_norm|lr|batch_size|loss_scale|skipped_steps|.*/weighted")
OPTIMISATION = {  # key: (title, y axis)
    "train/grad_norm": ("Gradient norm, before clipping", "L2 norm (1)"),
    "train/lr": ("Learning rate", "learning rate (1)"),
    "train/batch_size": ("Global batch", "batch size (sequences)"),
    "train/loss_scale": ("Loss scale of fp16", "factor (1)"),
    "train/skipped_steps": ("Skipped steps since the start", "skipped (steps)"),
}
SPEED = {
    "perf/tokens_per_s": ("Tokens per second, all ranks", "speed (tokens/s)"),
    "perf/tflops_per_rank": ("FLOPs of the model, per rank", "speed (TFLOP/s)"),
    "perf/mfu": ("Model FLOP utilisation", "share of the peak (1)"),
}
STAGES = {
    "perf/route_s": ("route", "blue"),
    "perf/dispatch_s": ("dispatch", "orange"),
    "perf/experts_s": ("experts", "further_0"),
    "perf/combine_s": ("combine", "further_1"),
}
BALANCE = {  # of a layer: (title, y axis, level of an even load)
    "imbalance": ("Imbalance", "max / mean load (1)", 1.0),
    "max_vio_run": ("MaxVio of the whole run", "max / mean load - 1 (1)", 0.0),
    "load_cv": ("Coefficient of variation", "deviation / mean load (1)", 0.0),
    "dead": ("Dead experts", "without a pair (experts)", None),
    "dropped": ("Dropped pairs", "share of chosen pairs (1)", None),
}
RANKS = {
    "rank_imbalance": ("Imbalance of the all-to-all", "max / mean load of ranks (1)", 1.0),
    "rank_overload": ("Overload of the ranks", "pairs above the mean / pairs (1)", 0.0),
}
WIDTH = {"experts_per_token": ("Mean number of experts", "experts per token (experts)", None)}
GATE = {
    "gate_entropy": ("Entropy of the gate", "entropy (nats)", None),
    "top1_prob": ("Highest probability", "mean probability (1)", None),
}


def run_sections(rows: Rows) -> list[Section]:
    """Return the sections that the records have data for, in the order of the page."""
    layers = moe_layers(rows)
    found = [
        Section("Loss", "Language-model loss, without auxiliary losses.", _loss(rows), wide=True),
        Section("Auxiliary losses", "Unweighted, each on its own scale; and weighted.", _auxiliary(rows)),
        Section("Optimisation", "What the optimizer did at each step.", _single(rows, OPTIMISATION)),
        Section(
            "Speed",
            "Stages are timed on the first rank, in forward passes.",
            [*_single(rows, SPEED, from_zero=True), *_stages(rows)],
        ),
        Section(
            "Balance",
            "Of every MoE layer, smoothed. MaxVio of a step is its imbalance - 1.",
            _by_layer(rows, layers, BALANCE),
        ),
        Section(
            "Experts per token",
            "How many experts compute a token; the maps show how the tokens of a layer are distributed.",
            [*_by_layer(rows, layers, WIDTH), *_widths(rows, layers)],
        ),
        Section("Gate", "The probabilities of the candidates, normalised.", _by_layer(rows, layers, GATE)),
        Section("Expert-parallel ranks", "Pairs that each rank receives.", _by_layer(rows, layers, RANKS)),
        Section("Numbers of layers and parts", "Each on its own scale, smoothed.", _further(rows, layers)),
        _expert_load(rows, layers),
    ]
    return [section for section in found if section.panels]


def _loss(rows: Rows) -> list[Panel]:
    steps, values = series(rows, "train/lm_loss")
    curves = raw_and_smoothed(steps, values, "blue", "training") if steps else []
    shown = list(values)
    sets = [("validation", "val/lm_loss")] + [
        (f"validation: {readable(name, 30)}", f"val/{name}/lm_loss") for name in further_sets(rows)
    ]
    for place, (label, key) in enumerate([*sets, ("test", "test/lm_loss")]):
        steps, values = series(rows, key)
        if steps:
            colour = VALIDATION_COLOURS[place % len(VALIDATION_COLOURS)]
            curves.append(Curve(label, *thin(steps, values), colour, points=True))
            shown += values
    return [Panel("Loss", "loss (nats/token)", curves, limits=spike_limits(shown))] if curves else []


def auxiliary_losses(rows: Rows) -> list[str]:
    """Return the names of the auxiliary losses in the records: the other keys of `train/`."""
    names = {key.removeprefix("train/") for row in rows for key in row if key.startswith("train/")}
    return sorted(name for name in names if NO_LOSS.fullmatch(name) is None)


def _auxiliary(rows: Rows) -> list[Panel]:
    names = auxiliary_losses(rows)[:MOST_PANELS]
    found = {f"train/{name}": (readable(name, 30), "unweighted loss (1)") for name in names}
    weighted = []
    for place, name in enumerate(names):
        colour = VALIDATION_COLOURS[place % len(VALIDATION_COLOURS)]
        weighted += _smoothed(rows, f"train/{name}/weighted", readable(name, 30), colour)
    panels = _single(rows, found)
    return [*panels, Panel("Weighted", "weight x loss (nats/token)", weighted)] if weighted else panels


def _single(rows: Rows, metrics: dict[str, tuple[str, str]], from_zero: bool = False) -> list[Panel]:
    """Return a panel for each metric of the run, by key."""
    panels = []
    for key, (title, label) in metrics.items():
        steps, values = series(rows, key)
        if not steps:
            continue
        if key == "train/lr":
            panels.append(Panel(title, label, [Curve("learning rate", *thin(steps, values), "blue")]))
            continue
        limits = spike_limits([*values, 0.0] if from_zero else values)
        panels.append(Panel(title, label, raw_and_smoothed(steps, values, "blue"), limits=limits))
    return panels


def _smoothed(rows: Rows, key: str, name: str, colour: Colour, named: bool = True) -> list[Curve]:
    """Return the smoothed curve of a metric, if it was recorded."""
    steps, values = series(rows, key)
    return [Curve(name, *thin(steps, smooth(values)), colour, named=named)] if steps else []


def _stages(rows: Rows) -> list[Panel]:
    curves = [it for key, (name, colour) in STAGES.items() for it in _smoothed(rows, key, name, colour)]
    return [Panel("Stages of the MoE layers (smoothed)", "time of a step (s)", curves)] if curves else []


def _by_layer(
    rows: Rows, layers: list[str], metrics: Mapping[str, tuple[str, str, float | None]]
) -> list[Panel]:
    panels = []
    for name, (title, label, level) in metrics.items():
        curves = layer_curves(rows, layers, name)
        if curves:
            panels.append(Panel(title, label, curves, limits=_flat(curves), level=level))
    return panels


def _flat(curves: list[Curve]) -> tuple[float, float] | None:
    """Return limits if all the curves are one constant; else None, so that the limits follow the data."""
    values = np.concatenate([curve.y for curve in curves])
    finite = values[np.isfinite(values)]
    return spike_limits(finite.tolist()) if len(finite) and not np.ptp(finite) else None


def layer_curves(rows: Rows, layers: list[str], name: str) -> list[Curve]:
    """Return a smoothed curve of a metric for each MoE layer that has it, coloured by depth."""
    named_every = -(-len(layers) // NAMED_LAYERS)
    curves = []
    for place, layer in enumerate(layers):
        named = place % named_every == 0 or place == len(layers) - 1
        depth = place / max(1, len(layers) - 1)
        curves += _smoothed(rows, f"moe/{layer}/{name}", _title(layer), depth, named)
    return curves


def _further(rows: Rows, layers: list[str]) -> list[Panel]:
    """Return a panel for each metric of layers whose name has a slash: losses, shares, numbers of parts."""
    pattern = re.compile("moe/[^/]+/(.+/.+)")
    keys = dict.fromkeys(key for row in rows for key, value in row.items() if value is not None)
    names = sorted({found[1] for key in keys if (found := pattern.fullmatch(key))})[:MOST_PANELS]
    labels = {"loss": "unweighted loss (1)", "gradient_share": "share of the gradient's norm (1)"}
    return [
        Panel(readable(name, 40), labels.get(name.split("/")[0], "value (the part's unit)"), curves)
        for name in names
        if (curves := layer_curves(rows, layers, name))
    ]


def _widths(rows: Rows, layers: list[str]) -> list[Panel]:
    """Return a heat map of experts per token for each layer, if the number differs between tokens."""
    found = {layer: series(rows, f"moe/{layer}/width_histogram") for layer in layers[:MOST_MAPS]}
    if not any(sum(count > 0 for count in counts) > 1 for _, lists in found.values() for counts in lists):
        return []
    panels = []
    for layer, (steps, lists) in found.items():
        if not steps:
            continue
        longest = max(map(len, lists))
        counts_RE = np.array([[*counts, *[0] * (longest - len(counts))] for counts in lists], dtype=float)
        edges_B, shares_EB = binned_shares(steps, counts_RE, MOST_BINS)
        heat_map = HeatMap(edges_B.tolist(), shares_EB, "share of tokens (1)", "share", 1.0)
        panels.append(Panel(_title(layer), "experts per token (experts)", heat_map=heat_map))
    return panels


def _expert_load(rows: Rows, every_layer: list[str]) -> Section:
    layers = every_layer[:MOST_MAPS]
    note = "Each expert's load over the mean load of its layer: 0 is idle, 1 is even."
    if len(every_layer) > MOST_MAPS:
        note += f" The first {MOST_MAPS} of {len(every_layer)} layers."
    experts = sum(len(found[0]) for layer in layers if (found := series(rows, f"moe/{layer}/load")[1][:1]))
    bins = int(np.clip(MOST_CELLS // max(1, experts), FEWEST_BINS, MOST_BINS))
    maps = [(layer, *load_shares(rows, layer, bins)) for layer in layers]
    finite = [shares_EB[np.isfinite(shares_EB)] for _, _, shares_EB in maps]
    highest = np.quantile(np.concatenate(finite), 0.995) if any(part.size for part in finite) else 2.0
    top = max(2.0, float(np.ceil(highest * 2) / 2))
    panels = [
        Panel(
            _title(layer),
            "expert (index)",
            heat_map=HeatMap(edges_B.tolist(), shares_EB, "load / mean load (1)", "load", top),
        )
        for layer, edges_B, shares_EB in maps
    ]
    return Section("Expert load", note, panels)


def load_shares(rows: Rows, layer: str, most_bins: int = MOST_BINS) -> tuple[np.ndarray, np.ndarray]:
    """Return how the load of a layer is distributed, in bins of neighbouring records.

    Returns:
        edges_B (float, bins + 1): steps where the bins begin and end.
        shares_EB (float, experts x bins): the expert's load in the bin / the mean load of the layer's experts
            in it; NaN where a bin has no pair at all.
    """
    steps, loads = series(rows, f"moe/{layer}/load")
    edges_B, shares_EB = binned_shares(steps, np.asarray(loads, dtype=float), most_bins)
    return edges_B, len(shares_EB) * shares_EB


def binned_shares(steps: list[int], counts_RE: np.ndarray, most_bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bins' edges [bins + 1] and each row's share of its counts [rows, bins], NaN without."""
    bins = np.array_split(np.arange(len(steps)), min(most_bins, len(steps)))
    counts_RE = np.minimum(counts_RE, LARGEST)
    counts_EB = np.stack([counts_RE[members].sum(axis=0) for members in bins], axis=1)
    totals_B = counts_EB.sum(axis=0)
    shares_EB = counts_EB / np.where(totals_B == 0, np.nan, totals_B)
    gap = float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0
    return np.asarray([steps[0] - gap, *(steps[members[-1]] for members in bins)], dtype=float), shares_EB


def _title(layer: str) -> str:
    return readable(layer.replace("_", " "), 30)
