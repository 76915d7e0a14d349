"""The files of a study of routing: JSON, a figure of each analysis, tables of tokens, lines of a summary.

A figure is a function `draw(figure, results)` on the plain data that `study` returns, drawn with matplotlib.
Figures of one checkpoint show the last one that was named.
"""

import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megamoe.io import replace_file
from megamoe.metrics.formats import name_non_finite, readable

Results = dict[str, Any]
WIDTH_IN, HEIGHT_IN, DPI = 10.4, 3.6, 150
COLUMNS = 2  # of figures with a panel for each layer
MOST_PANELS = 24  # more layers than that are left out of a figure, and are in the JSON
COLOURS = "turbo"  # of experts, which have no order
GRID, MUTED = "#e8eaef", "#6b7280"
STYLE = Path(__file__).with_suffix(".mplstyle")
RESULTS = "routing.json"
TABLES = "tokens.txt"


def figures_of(results: Results) -> dict[str, bytes]:
    """Return the PNG of each analysis that the results hold, by name."""
    names = set(results["comparisons"])
    for checkpoint in results["checkpoints"]:
        names |= set(checkpoint["analyses"])
    return {name: _render(DRAW[name], results) for name in DRAW if name in names}


def _render(draw: Callable[[Figure, Results], None], results: Results) -> bytes:
    with matplotlib.rc_context(fname=STYLE):
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure, results)
        png = io.BytesIO()
        figure.savefig(png, format="png")
        return png.getvalue()


def draw_collapse(figure: Figure, results: Results) -> None:
    """Draw RC by layer or by step; as Chi et al. 2022, figure 2c."""
    axes = figure.subplots()
    _lines(axes, results, "collapse", lambda value: value)
    axes.set_ylabel("RC (no unit; lower: collapsed)")
    axes.set_title("Representation collapse of the router's input")


def draw_required(figure: Figure, results: Results) -> None:
    """Draw the mean number of required experts; as Yang et al. 2024, figure 5."""
    panels = figure.subplots(1, len(results["thresholds"]), squeeze=False)[0]
    for axes, threshold in zip(panels, results["thresholds"], strict=True):
        key = f"{threshold:g}"
        _lines(axes, results, "required", lambda value, key=key: value[key]["mean"])  # type: ignore[misc]
        axes.set_ylabel("required experts (mean number a token)")
        axes.set_title(f"Experts that reach {key} of the probability")


def draw_positive(figure: Figure, results: Results) -> None:
    """Draw the share of positive activations; as Yang et al. 2024, figure 6."""
    axes = figure.subplots()
    _lines(axes, results, "positive", _percent, inside="experts")
    axes.set_ylabel("values above 0 (%)")
    axes.set_title("Positive values after the experts' activation")


def draw_tokens(figure: Figure, results: Results) -> None:
    """Draw the mutual information of expert and token identity beside its bounds."""
    name, found = _last(results, "tokens")
    axes = figure.subplots()
    numbers = [*found]
    bars = {"I(expert; token)": "mutual_information", "shuffled tokens": "chance"}
    bars["H(expert), the upper bound"] = "expert_entropy"
    for place, (label, key) in enumerate(bars.items()):
        at = np.arange(len(numbers)) + (place - 1) * 0.27
        axes.bar(at, [found[number][key] for number in numbers], width=0.25, label=label)
    axes.set_xticks(np.arange(len(numbers)), numbers)
    axes.set_xlabel("MoE layer (block number)")
    axes.set_ylabel("information (bits)")
    axes.set_title(f"What an expert says about its token: {name}")
    axes.legend()


def draw_load(figure: Figure, results: Results) -> None:
    """Draw each expert's share of the pairs in both modes; as Xie et al. 2022 (MoEC), figure 5."""
    name, found = _last(results, "load")
    for axes, number in _panels(figure, f"Load: {name}", [*found]):
        modes = found[number]
        experts = np.arange(len(modes["inference"]))
        for offset, mode in ((-0.2, "training"), (0.2, "inference")):
            axes.bar(experts + offset, 100 * np.asarray(modes[mode]), width=0.4, label=f"{mode} mode")
        axes.set_xlabel("expert (number)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_ylabel("share of pairs (%)")
        axes.margins(y=0.25)  # for the legend
        axes.legend(loc="upper left", ncols=2)


def draw_map(figure: Figure, results: Results) -> None:
    """Draw tokens on a plane, coloured by expert; as Chi et al. 2022, figures 2a and 2b."""
    name, found = _last(results, "map")
    for axes, number in _panels(figure, f"Tokens by expert: {name}", [*found]):
        points = found[number]
        xy_S2, first_S = np.asarray(points["xy_S2"]).reshape(-1, 2), np.asarray(points["first_S"])
        has_S = first_S >= 0
        axes.scatter(xy_S2[~has_S, 0], xy_S2[~has_S, 1], s=4, color=GRID, linewidths=0)
        x_S, y_S = xy_S2[has_S].T
        shown = axes.scatter(x_S, y_S, c=first_S[has_S], s=4, cmap=COLOURS, vmin=0, linewidths=0)
        first, second = (f"(no unit, {100 * share:.0f} % of variance)" for share in points["explained"])
        axes.set_xlabel(f"principal component 1 {first}")
        axes.set_ylabel(f"principal component 2 {second}")
        numbers = MaxNLocator(integer=True, min_n_ticks=1)
        figure.colorbar(shown, ax=axes, label="expert (number of the first choice)", ticks=numbers)


def draw_fluctuation(figure: Figure, results: Results) -> None:
    """Draw the share of tokens that change their expert; as Chi et al. 2022, figure 3a."""
    rows = results["comparisons"]["fluctuation"]
    axes = figure.subplots()
    for number in rows[0]["layers"]:
        shares = [100 * row["layers"][number]["first"] for row in rows]
        axes.plot(np.arange(len(rows)), shares, marker="o", label=f"layer {number}")
    names = [f"{row['earlier_step']} to {row['later_step']}" for row in rows]
    axes.set_xticks(np.arange(len(rows)), names)
    axes.set_xlabel("checkpoints compared (training steps)")
    axes.set_ylabel("tokens with another expert (%)")
    axes.set_ylim(bottom=0)
    axes.set_title("Routing fluctuation of the first choice")
    _legend(axes, len(rows[0]["layers"]))


DRAW: dict[str, Callable[[Figure, Results], None]] = {
    "collapse": draw_collapse,
    "required": draw_required,
    "positive": draw_positive,
    "load": draw_load,
    "tokens": draw_tokens,
    "map": draw_map,
    "fluctuation": draw_fluctuation,
}


def _lines(
    axes: Axes, results: Results, name: str, value: Callable[[Any], float | None], inside: str | None = None
) -> None:
    """Draw a line for each layer over the steps of one run, or for each checkpoint over the layers."""
    rows = [row for row in results["checkpoints"] if name in row["analyses"]]
    found = [row["analyses"][name][inside] if inside else row["analyses"][name] for row in rows]
    steps = [row["step"] for row in rows]
    runs = {Path(row["path"]).parent for row in rows}
    if len(rows) > 1 and len(runs) == 1 and len({*steps}) == len(steps):
        order = np.argsort(steps)
        for number in found[0]:
            values = _drawable([value(found[place][number]) for place in order])
            axes.plot([steps[place] for place in order], values, marker="o", label=f"layer {number}")
        axes.set_xlabel("training step")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
        _legend(axes, len(found[0]))
        return
    for row, layers in zip(rows, found, strict=True):
        label = readable(f"{row['run']}, step {row['step']}", 40)
        values = _drawable([value(layer) for layer in layers.values()])
        axes.plot(np.arange(len(layers)), values, marker="o", label=label)
    axes.set_xticks(np.arange(len(found[0])), [*found[0]])
    axes.set_xlabel("MoE layer (block number)")
    _legend(axes, len(rows))


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _drawable(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _last(results: Results, name: str) -> tuple[str, Any]:
    row = [row for row in results["checkpoints"] if name in row["analyses"]][-1]
    return readable(f"{row['run']}, step {row['step']}", 40), row["analyses"][name]


def _panels(figure: Figure, title: str, numbers: list[str]) -> list[tuple[Axes, str]]:
    """Return an axes for each layer, in rows; the figure grows with them."""
    shown = numbers[:MOST_PANELS]
    rest = f" (first {MOST_PANELS} of {len(numbers)} layers)" if len(numbers) > len(shown) else ""
    columns = min(COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    figure.set_size_inches(WIDTH_IN, 0.5 + HEIGHT_IN * rows)
    figure.suptitle(title + rest, x=0.012, ha="left", fontsize=12, fontweight="bold")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    for axes, number in zip(grid.flat, shown, strict=False):
        axes.set_title(f"layer {number}")
    return [*zip(grid.flat, shown, strict=False)]


def _legend(axes: Axes, lines: int) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), ncols=-(-lines // 12))


def write_study(folder: Path, results: dict[str, Any]) -> list[Path]:
    """Write the files into a folder; return them. Each is replaced in one move.

    Raises:
        OSError: if one cannot be written.
    """
    contents = {RESULTS: (json.dumps(name_non_finite(results), allow_nan=False) + "\n").encode()}
    if tables := token_tables(results):
        contents[TABLES] = tables.encode(errors="backslashreplace")
    contents |= {f"{name}.png": png for name, png in figures_of(results).items()}
    for name, content in contents.items():
        replace_file(folder / name, content)
    return [folder / name for name in contents]


def token_tables(results: dict[str, Any]) -> str:
    """Return the tokens of every expert as text; empty if the study has none."""
    lines: list[str] = []
    for checkpoint in results["checkpoints"]:
        for number, found in checkpoint["analyses"].get("tokens", {}).items():
            lines.append(f"{checkpoint['run']}, step {checkpoint['step']}, layer {number}")
            for expert, rows in enumerate(found["experts"]):
                lines.append(f"  expert {expert}" + ("" if rows else ": no token"))
                lines += [_line(row) for row in rows]
    return "".join(f"{line}\n" for line in lines)


def _line(row: dict[str, Any]) -> str:
    token = row["token"] if row["text"] is None else repr(row["text"])
    share = 100 * row["of_token"]
    example = repr(row["examples"][0]) if row["examples"] else ""
    return f"    {token!s:<16} {row['count']:>6} tokens, {share:5.1f} % of this one   {example}"


def _number(value: float | None, pattern: str = "{:.4f}") -> str:
    return "none" if value is None else pattern.format(value)


# (found of one layer) -> its number, for the analyses of one checkpoint
_NUMBERS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "collapse": ("representation collapse RC", _number),
    "required": (
        "required experts",
        lambda found: ", ".join(f"{row['mean']:.3f} for {key}" for key, row in found.items()),
    ),
    "load": (
        "distance of loads in training and inference",
        lambda found: _number(100 * found["distance"], "{:.2f} %"),
    ),
    "tokens": (
        "mutual information with the token, bits",
        lambda found: f"{found['mutual_information']:.4f} (shuffled {found['chance']:.4f})",
    ),
    "map": ("map", lambda found: f"{len(found['first_S'])} tokens"),
}


def summary_lines(results: dict[str, Any]) -> Iterator[str]:
    """Yield lines of text: each checkpoint's numbers by layer, then the comparisons."""
    for row in results["checkpoints"]:
        yield f"{row['run']}, step {row['step']}: loss {row['lm_loss']:.6f}, {row['tokens']:,} tokens"
        for name, found in row["analyses"].items():
            yield from _of_checkpoint(name, found)
    for row in results["comparisons"].get("fluctuation", ()):
        yield f"fluctuation, {row['earlier']} to {row['later']}"
        for number, found in row["layers"].items():
            yield f"  layer {number}: {100 * found['first']:.2f} % of the first choices changed"


def _of_checkpoint(name: str, found: dict[str, Any]) -> Iterator[str]:
    if name == "positive":
        for kind in ("experts", "dense"):
            for number, share in found[kind].items():
                yield f"  layer {number}, {kind}: positive activations {_number(_percent(share), '{:.2f} %')}"
    else:
        label, number_of = _NUMBERS[name]
        for number, layer in found.items():
            yield f"  layer {number}: {label} {number_of(layer)}"
