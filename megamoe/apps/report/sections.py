"""The sections of the report of one run: which metrics of its record are drawn, and under which axes.

docs/run/metrics.md defines every metric. A metric that was not recorded has no panel.
"""

from collections.abc import Mapping

import numpy as np

from megamoe.apps.report.palette import nth_curve
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
from megamoe.apps.report.run_statistics import Rows, further_sets, moe_layers, recorded, series
from megamoe.metrics import names
from megamoe.metrics.formats import readable
from megamoe.metrics.names import fill, of_layer

NAMED_LAYERS = 8  # more of them share a few names in the legend
MOST_BINS, FEWEST_BINS = 100, 20  # columns of a heat map
MOST_CELLS = 400_000  # of all heat maps of a section
MOST_MAPS, MOST_PANELS = 100, 30  # of a section
OPTIMISATION = {  # key: (title, quantity)
    names.GRAD_NORM: ("Gradient norm, before clipping", "L2 norm"),
    names.LR: ("Learning rate", "learning rate"),
    names.BATCH_SIZE: ("Global batch", "batch size"),
    names.LOSS_SCALE: ("Loss scale of fp16", "factor"),
    names.SKIPPED_STEPS: ("Skipped steps since the start", "skipped"),
}
SPEED = {
    names.TOKENS_PER_S: ("Tokens per second, all ranks", "speed"),
    names.TFLOPS_PER_RANK: ("FLOPs of the model, per rank", "speed"),
    names.MFU: ("Model FLOP utilisation", "share of the peak"),
}
BALANCE = {  # of a layer: (title, quantity, level of an even load)
    names.IMBALANCE: ("Imbalance", "max / mean load", 1.0),
    names.MAX_VIO_RUN: ("MaxVio of the whole run", "max / mean load - 1", 0.0),
    names.LOAD_CV: ("Coefficient of variation", "deviation / mean load", 0.0),
    names.DEAD: ("Dead experts", "without a pair", None),
    names.DROPPED: ("Dropped pairs", "share of chosen pairs", None),
}
RANKS = {
    names.RANK_IMBALANCE: ("Imbalance of the all-to-all", "max / mean load of ranks", 1.0),
    names.RANK_OVERLOAD: ("Overload of the ranks", "pairs above the mean / pairs", 0.0),
}
WIDTH = {names.EXPERTS_PER_TOKEN: ("Mean number of experts", "experts per token", None)}
GATE = {
    names.GATE_ENTROPY: ("Entropy of the gate", "entropy", None),
    names.TOP1_PROB: ("Highest probability", "mean probability", None),
}
QUANTITIES = {"loss": "unweighted loss"}


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
    steps, values = series(rows, names.LM_LOSS)
    curves = raw_and_smoothed(steps, values, "blue", "training") if steps else []
    shown, keys = list(values), [names.LM_LOSS] * bool(steps)
    sets = [(f"validation: {readable(it, 30)}", fill(names.SET_LM_LOSS, it)) for it in further_sets(rows)]
    sets = [("validation", names.VAL_LM_LOSS), *sets, ("test", names.TEST_LM_LOSS)]
    for place, (label, key) in enumerate(sets):
        steps, values = series(rows, key)
        if steps:
            colour, dash = nth_curve(place + 1)
            curves.append(Curve(label, *thin(steps, values), colour, points=True, dash=dash))
            shown += values
            keys.append(key)
    label, limits = axis("loss", names.LM_LOSS), spike_limits(shown)
    return [Panel("Loss", label, curves, tuple(keys), limits=limits)] if curves else []


def auxiliary_losses(rows: Rows) -> list[str]:
    """Return the keys of the losses beside the main one: auxiliary ones, and of multi-token prediction."""
    others = (names.AUXILIARY_LOSS, names.MTP_LOSS)
    found = (key for key in recorded(rows) if key.startswith("train/"))
    return sorted(key for key in found if (of := names.metric_of(key)) is None or of.key in others)


def _auxiliary(rows: Rows) -> list[Panel]:
    found = {key: readable(key.removeprefix("train/"), 30) for key in auxiliary_losses(rows)[:MOST_PANELS]}
    weighted = []
    for place, (key, name) in enumerate(found.items()):
        weighted += _smoothed(
            rows, fill(names.WEIGHTED_LOSS, key.removeprefix("train/")), name, *nth_curve(place)
        )
    panels = _single(rows, {key: (name, "unweighted loss") for key, name in found.items()})
    label = axis("weight x loss", names.WEIGHTED_LOSS)
    keys = (names.WEIGHTED_LOSS,)
    return [*panels, Panel("Weighted", label, weighted, keys)] if weighted else panels


def axis(quantity: str, key: str) -> str:
    """Return the title of an axis: the quantity with the unit of a metric."""
    metric = names.metric_of(key)
    return f"{quantity} ({'1' if metric is None else metric.unit})"


def _single(rows: Rows, metrics: dict[str, tuple[str, str]], from_zero: bool = False) -> list[Panel]:
    """Return a panel for each metric of the run, by key."""
    panels = []
    for key, (title, quantity) in metrics.items():
        steps, values = series(rows, key)
        if not steps:
            continue
        label = axis(quantity, key)
        if key == names.LR:
            panels.append(Panel(title, label, [Curve("learning rate", *thin(steps, values), "blue")], (key,)))
            continue
        limits = spike_limits([*values, 0.0] if from_zero else values)
        panels.append(Panel(title, label, raw_and_smoothed(steps, values, "blue"), (key,), limits=limits))
    return panels


def _smoothed(
    rows: Rows, key: str, name: str, colour: Colour, dash: str = "solid", named: bool = True
) -> list[Curve]:
    """Return the smoothed curve of a metric, if it was recorded."""
    steps, values = series(rows, key)
    return [Curve(name, *thin(steps, smooth(values)), colour, named=named, dash=dash)] if steps else []


def _stages(rows: Rows) -> list[Panel]:
    stages = enumerate(names.STAGES.items())
    curves = [it for place, (name, key) in stages for it in _smoothed(rows, key, name, *nth_curve(place))]
    label, keys = axis("time of a step", names.STEP_S), tuple(names.STAGES.values())
    return [Panel("Stages of the MoE layers (smoothed)", label, curves, keys)] if curves else []


def _by_layer(
    rows: Rows, layers: list[str], metrics: Mapping[str, tuple[str, str, float | None]]
) -> list[Panel]:
    panels = []
    for name, (title, quantity, level) in metrics.items():
        curves = layer_curves(rows, layers, name)
        if curves:
            label = axis(quantity, names.over_layers(name))
            keys = (of_layer("<layer>")[name],)
            panels.append(Panel(title, label, curves, keys, limits=flat_limits(curves), level=level))
    return panels


def flat_limits(curves: list[Curve]) -> tuple[float, float] | None:
    """Return limits if all the curves are one constant; else None, so that the limits follow the data."""
    values = np.concatenate(
        [part for curve in curves for part in (curve.y, curve.low or [], curve.high or [])]
    )
    finite = values[np.isfinite(values)]
    return spike_limits(finite.tolist()) if len(finite) and np.ptp(finite) <= 1e-9 * abs(finite[0]) else None


def layer_curves(rows: Rows, layers: list[str], name: str) -> list[Curve]:
    """Return a smoothed curve of a metric for each MoE layer that has it, coloured by depth."""
    named_every = -(-len(layers) // NAMED_LAYERS)
    curves = []
    for place, layer in enumerate(layers):
        named = place % named_every == 0 or place == len(layers) - 1
        depth = place / max(1, len(layers) - 1)
        curves += _smoothed(rows, of_layer(layer)[name], _title(layer), depth, named=named)
    return curves


def _further(rows: Rows, layers: list[str]) -> list[Panel]:
    """Return a panel for each metric of layers whose name has a slash: losses, shares, numbers of parts."""
    found = {of[2] for key in recorded(rows) if (of := names.IN_LAYER.fullmatch(key)) and "/" in of[2]}
    return [
        Panel(readable(name, 40), _label(name), curves, (of_layer("<layer>")[name],))
        for name in sorted(found)[:MOST_PANELS]
        if (curves := layer_curves(rows, layers, name))
    ]


def _label(name: str) -> str:
    quantity = QUANTITIES.get(name.split("/")[0], "value")
    return axis(quantity, of_layer(1)[name])


def _widths(rows: Rows, layers: list[str]) -> list[Panel]:
    """Return a heat map of experts per token for each layer, if the number differs between tokens."""
    found = {layer: series(rows, of_layer(layer)[names.WIDTH_HISTOGRAM]) for layer in layers[:MOST_MAPS]}
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
        keys = (of_layer(layer)[names.WIDTH_HISTOGRAM],)
        panels.append(Panel(_title(layer), "experts per token (experts)", [], keys, heat_map))
    return panels


def _expert_load(rows: Rows, every_layer: list[str]) -> Section:
    layers = every_layer[:MOST_MAPS]
    note = "Each expert's load over the mean load of its layer: 0 is idle, 1 is even."
    if len(every_layer) > MOST_MAPS:
        note += f" The first {MOST_MAPS} of {len(every_layer)} layers."
    experts = sum(
        len(found[0]) for layer in layers if (found := series(rows, of_layer(layer)[names.LOAD])[1][:1])
    )
    bins = int(np.clip(MOST_CELLS // max(1, experts), FEWEST_BINS, MOST_BINS))
    maps = [(layer, *load_shares(rows, layer, bins)) for layer in layers]
    finite = [shares_EB[np.isfinite(shares_EB)] for _, _, shares_EB in maps]
    highest = np.quantile(np.concatenate(finite), 0.995) if any(part.size for part in finite) else 2.0
    top = max(2.0, float(np.ceil(highest * 2) / 2))
    panels = [
        Panel(
            _title(layer),
            "expert (index)",
            keys=(of_layer(layer)[names.LOAD],),
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
    steps, loads = series(rows, of_layer(layer)[names.LOAD])
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
