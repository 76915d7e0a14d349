"""The pictures of a study's page: measures by row and seed, and curves over the steps, as SVG."""

from pathlib import Path
from typing import Any

from megamoe.apps.lab.measures import tokens_at
from megamoe.apps.lab.plan import Plan

WIDTH, ROW_HEIGHT, CURVE_HEIGHT = 7.0, 0.32, 3.6  # in inches


def draw(plan: Plan, results: dict[str, Any], folder: Path) -> list[Path]:
    """Draw the measures of the claims and the curves into the folder; return the files."""
    import matplotlib

    matplotlib.use("Agg")
    return _measures(plan, results, folder) + _curves(plan, results, folder)


def _measures(plan: Plan, results: dict[str, Any], folder: Path) -> list[Path]:
    """Draw each measure of the claims: a dot for each seed, and a bar for the mean."""
    from matplotlib import pyplot

    shown = list(dict.fromkeys(name for _, claim in plan.claims for name, _ in claim.operands()))
    paths = []
    for name in shown or list(plan.study.measures)[:1]:
        rows = {row: found for row, found in results["rows"].items() if found["measures"][name]["seeds"]}
        if not rows:
            continue
        figure, axes = pyplot.subplots(figsize=(WIDTH, 1.0 + ROW_HEIGHT * len(rows)), layout="constrained")
        for place, found in enumerate(rows.values()):
            values = found["measures"][name]
            seeds = [*values["seeds"].values()]
            axes.plot(seeds, [place] * len(seeds), "o", color="#2c6fbb", alpha=0.6, markersize=5)
            axes.plot([values["mean"]], [place], "|", color="#1f2430", markersize=16, markeredgewidth=2)
        axes.set_yticks(range(len(rows)), [*rows])
        axes.invert_yaxis()
        axes.grid(axis="x", color="#e8eaef")
        axes.set_xlabel(plan.study.measures[name].text or name)
        paths.append(_saved(figure, folder / f"{name}.svg"))
    return paths


def _curves(plan: Plan, results: dict[str, Any], folder: Path) -> list[Path]:
    """Draw each curve: a line for each row over the tokens, of fine-tunings over the steps."""
    from matplotlib import pyplot

    paths = []
    for name, of_rows in results["curves"].items():
        if not of_rows:
            continue
        figure, axes = pyplot.subplots(figsize=(WIDTH, CURVE_HEIGHT), layout="constrained")
        of_runs = plan.study.curves[name].metric is not None
        for row, points in of_rows.items():
            steps = [step for step, _ in points]
            places = [tokens_at(results, row, points, step) for step in steps] if of_runs else steps
            axes.plot(places, [value for _, value in points], label=row)
        axes.set_xlabel("tokens" if of_runs else "step")
        axes.set_ylabel(plan.study.curves[name].text or plan.study.curves[name].metric or name)
        axes.grid(color="#e8eaef")
        axes.legend(fontsize="small")
        paths.append(_saved(figure, folder / f"curve_{name}.svg"))
    return paths


def _saved(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = path.stem  # the same picture has the same bytes
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
