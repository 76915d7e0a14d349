"""The report of a run: `report.html`, which is self-contained (no network, no scripts), and `report.png`.

The charts are PNGs inside the page, each once for a light and once for a dark reader; the browser
picks. Both files are replaced in one move, so that a reader never meets half of one.
"""

import base64
import os
from html import escape
from pathlib import Path
from string import Template

from megamoe.metrics.formats import format_count, format_duration, format_number
from megamoe.metrics.report.charts import Chart, charts_for, render, render_all
from megamoe.metrics.report.run_statistics import (
    Rows,
    Run,
    RunStatistics,
    compute_statistics,
    moe_layers,
    read_run,
)
from megamoe.metrics.report.themes import DARK, LIGHT
from megamoe.plain_files import read_plain

REPORT_FILE = "report.html"
IMAGE_FILE = "report.png"
CONFIG_FILE = "config.yaml"
LARGEST_CONFIG = 1 << 24  # bytes

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$name</title>
<style>
:root { --page: #f3f4f7; --card: #ffffff; --text: #1f2430; --muted: #6b7280; --line: #e8eaef; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0f1116; --card: #171a21; --text: #e6e8ee; --muted: #9aa2b1; --line: #2a2f3a; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 32px 20px 56px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0; }
header p, section p { color: var(--muted); margin: 2px 0 14px; }
section, .tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
section { padding: 18px 20px; margin-top: 18px; }
img { display: block; width: 100%; height: auto; }
.tiles { display: flex; flex-wrap: wrap; gap: 14px; margin: 0; }
.tiles div { flex: 1 1 150px; padding: 12px 16px; }
.tiles dt { color: var(--muted); font-size: 13px; }
.tiles dd { margin: 0; font-size: 25px; font-weight: 600; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; margin-top: 8px; }
th, td { text-align: left; padding: 6px 0; border-top: 1px solid var(--line); vertical-align: top; }
tr:first-child > * { border-top: 0; }
th { font-weight: 400; color: var(--muted); width: 38%; padding-right: 16px; }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
pre { margin: 12px 0 0; overflow-x: auto; font: 13px/1.5 ui-monospace, monospace; }
summary { cursor: pointer; font-size: 17px; font-weight: 700; }
</style>
</head>
<body>
<main>
<header><h1>$name</h1><p>$subtitle</p></header>
<dl class="tiles">
$tiles
</dl>
<section><h2>Main facts</h2>
<table>
$stats
</table></section>
$charts
$config
</main>
</body>
</html>
""")


def write_report(run_folder: Path) -> Path:
    """Write `report.html` and `report.png` into the run folder; return the path of the page.

    Reads `metrics.jsonl`, and `summary.json` and `config.yaml` if they exist.

    Raises:
        UserError: if the folder or its metrics are missing, empty or broken.
    """
    run = read_run(run_folder)
    charts = charts_for(run.rows)
    page = _page(run, charts)
    if charts:
        _write_whole(run_folder / IMAGE_FILE, render_all(charts, run.rows, LIGHT, run.name))
    _write_whole(run_folder / REPORT_FILE, page.encode(errors="backslashreplace"))
    return run_folder / REPORT_FILE


def _page(run: Run, charts: list[Chart]) -> str:
    stats = compute_statistics(run.rows)
    table = statistics_table(run, stats)
    text = escape(_configuration(run.folder / CONFIG_FILE))
    config = ""
    if text:
        config = f"<section><details><summary>Configuration</summary><pre>{text}</pre></details></section>"
    return PAGE.substitute(
        name=escape(run.name),
        subtitle=escape(" · ".join(_headline(stats, run.rows))),
        tiles="\n".join(
            f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in _tiles(stats)
        ),
        stats="\n".join(
            f"<tr><th>{escape(label)}</th><td>{escape(value)}</td></tr>" for label, value in table
        ),
        charts="\n".join(_chart_section(chart, run.rows) for chart in charts),
        config=config,
    )


def _configuration(path: Path) -> str:
    """Return the resolved configuration; empty if the file is missing or not one that a run writes."""
    try:
        return read_plain(path, LARGEST_CONFIG).decode("utf-8", errors="replace").rstrip()
    except (OSError, ValueError):
        return ""


def _headline(stats: RunStatistics, rows: Rows) -> list[str]:
    layers = moe_layers(rows)
    parts = [f"{stats.steps:,} steps"]
    if stats.tokens is not None:
        parts.append(f"{format_count(stats.tokens)} tokens")
    if stats.time_s is not None:
        parts.append(format_duration(stats.time_s))
    return [*parts, f"{len(layers)} MoE layer{'s' if len(layers) > 1 else ''}" if layers else "dense"]


def _tiles(stats: RunStatistics) -> list[tuple[str, str]]:
    tiles = [
        ("Validation loss", stats.val_loss_last, "{:.3f}"),
        ("Perplexity", stats.perplexity, "{:,.1f}"),
        ("Training loss", stats.train_loss, "{:.3f}"),
        ("Tokens per second", stats.tokens_per_s, "{:,.0f}"),
        ("Imbalance at the end", stats.max_imbalance, "{:.2f}"),
    ]
    return [(label, format_number(value, pattern)) for label, value, pattern in tiles if value is not None]


def statistics_table(run: Run, stats: RunStatistics) -> list[tuple[str, str]]:
    """Return the run's statistics as (label, text), without those that were not recorded."""
    fall = stats.val_fall_percent
    total, active = run.summary.get("parameters_total"), run.summary.get("parameters_active")
    rows: list[tuple[str, str, float | None]] = [
        ("Parameters", "{:,}", total),
        ("Parameters active per token", "{:,}", active),
        ("Steps", "{:,}", stats.steps),
        ("Tokens", "{:,}", stats.tokens),
        ("Training loss, last step", "{:.4f}", stats.train_loss),
        ("Validation loss, first", "{:.4f}", stats.val_loss_first),
        ("Validation loss, best", "{:.4f}", stats.val_loss_best),
        ("Validation loss, last", "{:.4f}", stats.val_loss_last),
        *((f"Validation loss, {name}", "{:.4f}", loss) for name, loss in stats.further_val_losses.items()),
        ("Fall of the validation loss", "{:.2f} %", fall),
        ("Validation perplexity", "{:,.2f}", stats.perplexity),
        ("Tokens per second, median", "{:,.0f}", stats.tokens_per_s),
        ("Imbalance at the end, worst layer", "{:.2f}", stats.max_imbalance),
    ]
    table = [(label, format_number(value, pattern)) for label, pattern, value in rows if value is not None]
    if stats.time_s is not None:
        table.append(("Time in training steps", format_duration(stats.time_s)))
    if moe_layers(run.rows):
        idle = [
            f"{layer.replace('_', ' ')}: {', '.join(map(str, experts))}"
            for layer, experts in stats.never_used.items()
        ]
        table.append(("Experts never used", "; ".join(idle) or "none"))
    return table


def _chart_section(chart: Chart, rows: Rows) -> str:
    light, dark = (
        "data:image/png;base64," + base64.b64encode(render(chart, rows, theme)).decode()
        for theme in (LIGHT, DARK)
    )
    return (
        f"<section><h2>{escape(chart.title)}</h2><p>{escape(chart.note)}</p>"
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(chart.title)} by step"></picture></section>'
    )


def _write_whole(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
