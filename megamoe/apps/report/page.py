"""The report of a run (`report.html`), and the page that compares runs: one HTML file that needs no network.

plotly.js, styles, scripts and data are inside. A file is replaced in one move, so that a reader never meets
half of one.
"""

from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path
from string import Template

from megamoe.apps.report.charts import charts, navigation
from megamoe.apps.report.comparison import (
    comparison_sections,
    config_differences,
    differ_in_seed,
    grouped,
    labels_of,
    seed_rows,
)
from megamoe.apps.report.palette import as_style
from megamoe.apps.report.panels import Section
from megamoe.apps.report.run_statistics import COMPARED, Run, RunStatistics, comparison_row, read_run
from megamoe.apps.report.sections import run_sections
from megamoe.io import replace_file
from megamoe.metrics.formats import format_count, format_duration, format_number

REPORT_FILE = "report.html"
LONG = ' class="long"'  # of a cell whose text may break
ASSETS = Path(__file__).parent / "assets"


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into the run folder; return its path.

    Reads `metrics.jsonl`, and `summary.json` and `config.yaml` if they exist. A run without a record gets a
    page that says so.

    Raises:
        UserError: if the folder or its metrics are missing or broken.
        OSError: if the file cannot be written.
    """
    return write_page([read_run(run_folder)], run_folder / REPORT_FILE)


def write_page(runs: list[Run], path: Path) -> Path:
    """Write the page of a run, or the page that compares runs; return its path.

    Raises:
        OSError: if the file cannot be written.
    """
    content = content_of(runs)
    replace_file(path, document(content[0], main_of(*content)).encode(errors="backslashreplace"))
    return path


def content_of(runs: list[Run]) -> tuple[str, str, list[str], list[Section]]:
    """Return the heading of a page, the line below it, its HTML before the charts, and the charts."""
    if len(runs) == 1:
        (run,) = runs
        return run.name, headline(run), _parts(run), run_sections(run.rows)
    title = f"Comparison of {len(runs)} runs"
    note = (
        "Runs whose configurations differ in nothing but the seed and the name are one curve: "
        "the mean, in a band from the lowest run to the highest."
    )
    return title, note, _comparison_parts(runs), comparison_sections(runs)


def headline(run: Run) -> str:
    """Return the run's state and size in a line."""
    if not run.rows:
        return "No step is recorded yet: the run has not reached its first logged step, or ended before it."
    stats = run.statistics
    parts = [f"{stats.steps:,} steps"]
    planned = run.summary.get("steps")
    if planned is not None:
        done = stats.steps >= planned
        more = "finished" if done else "not finished: still running, stopped or interrupted"
        parts = [f"{more}, {stats.steps:,} of {planned:,} steps"]
    if stats.tokens is not None:
        parts.append(f"{format_count(stats.tokens)} tokens")
    if stats.time_s is not None:
        parts.append(format_duration(stats.time_s))
    layers = run.layers
    parts.append(f"{len(layers)} MoE layer{'s' if len(layers) > 1 else ''}" if layers else "dense")
    return " · ".join(parts)


def _parts(run: Run) -> list[str]:
    parts = []
    if run.rows:
        stats = run.statistics
        tiles = "\n".join(
            f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in _tiles(stats)
        )
        parts.append(f'<dl class="tiles">\n{tiles}\n</dl>')
        parts.append(f"<section><h2>Main facts</h2>{table(statistics_table(run, stats))}</section>")
    if run.config_text:
        text = escape(run.config_text)
        parts.append(
            f'<section><details id="configuration"><summary>Configuration</summary>'
            f"<pre>{text}</pre></details></section>"
        )
    return parts


def _comparison_parts(runs: list[Run]) -> list[str]:
    labels = labels_of(runs)
    rows = [[label, *comparison_row(run)[1:]] for label, run in zip(labels, runs, strict=True)]
    parts = [f"<section><h2>Runs</h2>{table(rows, COMPARED)}</section>"]
    groups = grouped(runs)
    repeated = [group for group in groups if len(group.runs) > 1]
    if repeated:
        title = "Over seeds" if all(differ_in_seed(group.runs) for group in repeated) else "Repeated runs"
        head = ["runs that differ at most in the seed", "runs", "last val", "best val", "tok/s", "imbalance"]
        note = "<p>Mean ± standard deviation of the sample.</p>"
        parts.append(f"<section><h2>{title}</h2>{note}{table(seed_rows(groups), head)}</section>")
    differences = config_differences(runs)
    shown = table(differences, ["key", *labels]) if differences else "<p>Nothing but names and folders.</p>"
    parts.append(f"<section><h2>What differs in the configurations</h2>{shown}</section>")
    return parts


def _shown(rows: list[tuple[str, float | None, str]]) -> list[tuple[str, str]]:
    """Return the values as text, without those that were not recorded. rows: label, value, pattern."""
    return [(label, format_number(value, pattern)) for label, value, pattern in rows if value is not None]


def _tiles(stats: RunStatistics) -> list[tuple[str, str]]:
    of_set = stats.of_set
    tiles = [
        (f"Validation loss{of_set}", stats.val_loss_last, "{:.3f}"),
        (f"Perplexity{of_set}", stats.perplexity, "{:,.1f}"),
        ("Training loss", stats.train_loss, "{:.3f}"),
        ("Tokens per second", stats.tokens_per_s, "{:,.0f}"),
        ("Imbalance at the end", stats.max_imbalance, "{:.2f}"),
    ]
    return _shown(tiles)


def statistics_table(run: Run, stats: RunStatistics) -> list[tuple[str, str]]:
    """Return the run's statistics as (label, text), without those that were not recorded."""
    fall, of_set = stats.val_fall_percent, stats.of_set
    further = {name: loss for name, loss in stats.further_val_losses.items() if name != stats.val_set}
    total, active = run.summary.get("parameters_total"), run.summary.get("parameters_active")
    rows: list[tuple[str, float | None, str]] = [
        ("Parameters", total, "{:,}"),
        ("Parameters active per token", active, "{:,}"),
        ("Steps", stats.steps, "{:,}"),
        ("Tokens", stats.tokens, "{:,}"),
        ("Training loss, last step", stats.train_loss, "{:.4f}"),
        (f"Validation loss{of_set}, first", stats.val_loss_first, "{:.4f}"),
        (f"Validation loss{of_set}, best", stats.val_loss_best, "{:.4f}"),
        (f"Validation loss{of_set}, last", stats.val_loss_last, "{:.4f}"),
        *((f"Validation loss, {name}", loss, "{:.4f}") for name, loss in further.items()),
        (f"Fall of the validation loss{of_set}", fall, "{:.2f} %"),
        (f"Validation perplexity{of_set}", stats.perplexity, "{:,.2f}"),
        ("Tokens per second, median", stats.tokens_per_s, "{:,.0f}"),
        ("Imbalance at the end, worst layer", stats.max_imbalance, "{:.2f}"),
        ("Pairs dropped at the end, worst layer", stats.max_dropped, "{:.1%}"),
    ]
    table = _shown(rows)
    if stats.time_s is not None:
        table.append(("Time in training steps", format_duration(stats.time_s)))
    if run.layers:
        idle = [
            f"{layer.replace('_', ' ')}: {', '.join(map(str, experts))}"
            for layer, experts in stats.never_used.items()
        ]
        table.append(("Experts never used", "; ".join(idle) or "none"))
    return table


def document(title: str, main: str) -> str:
    """Return the page around its `<main>`."""
    from megamoe.apps.report.figures import library  # see there: not at every rank's start

    return Template(_asset("page.html")).substitute(
        title=escape(title),
        style=as_style() + _asset("page.css"),
        main=main,
        library=library(),
        script=_asset("page.js"),
    )


def main_of(heading: str, subtitle: str, parts: list[str], sections: list[Section]) -> str:
    """Return the `<main>` of a page. parts: HTML before the sections."""
    from megamoe.apps.report.figures import as_json

    without = "<noscript><section><p>The charts need JavaScript.</p></section></noscript>"
    return "\n".join(
        [
            f"<main><header><h1>{escape(heading)}</h1><p>{escape(subtitle)}</p>",
            f"{navigation(sections)}</header>",
            *parts,
            *charts(sections),
            without if sections else "",
            f'<script type="application/json" id="figures">{as_json(sections)}</script>',
            "</main>",
        ]
    )


def table(rows: Sequence[Sequence[str]], head: list[str] | None = None) -> str:
    """Return an HTML table whose rows begin with their header; `head` names the columns."""
    lines = [] if head is None else ["<tr>" + "".join(f"<th>{escape(it)}</th>" for it in head) + "</tr>"]
    for first, *others in rows:
        cells = "".join(f"<td{LONG * (len(it) > 24)}>{escape(it)}</td>" for it in others)
        lines.append(f"<tr><th>{escape(first)}</th>{cells}</tr>")
    kind = "facts" if head is None else "wide"
    scrolls = "" if head is None else ' tabindex="0" role="region" aria-label="table"'
    return f'<div class="table"{scrolls}><table class="{kind}">\n' + "\n".join(lines) + "\n</table></div>"


@cache
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
