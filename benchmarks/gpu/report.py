"""The sections by name, and the report of what they found."""

import html
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu import collectives, comparisons, environment, extensions, kernels, parity, rates, training
from gpu.findings import Finding, Machine, Section

SECTIONS: dict[str, Callable[[Machine, Section], None]] = {
    "environment": environment.run,
    "rates": rates.run,
    "collectives": collectives.run,
    "parity": parity.run,
    "kernels": kernels.run,
    "transformer_engine": extensions.run,
    "layer": comparisons.run_layer,
    "step": comparisons.run_step,
    "training": training.run,
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
body { color: #1c1c1e; background: #fff; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top; }
td.value { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.failed, .error { color: #b00020; font-weight: 600; } .passed { color: #1b7f3b; } .note { color: #666; }
@media (prefers-color-scheme: dark) {
  body { color: #e8e8ea; background: #161618; } td, th { border-color: #333; } .note { color: #999; }
  .failed, .error { color: #ff7b8a; } .passed { color: #6fd08c; }
}
"""


def load_section(path: Path, name: str) -> Section:
    """Return the section that a process wrote; an empty one if it wrote none."""
    try:
        return Section.from_data(json.loads(path.read_text()))
    except (OSError, ValueError):
        return Section(name)


def summary(section: Section) -> str:
    """Return the section's line for the console."""
    failed = [finding.name for finding in section.findings if finding.holds is False]
    detail = section.reason or ", ".join(failed) or f"{len(section.findings)} findings"
    return f"{section.name}: {section.status}: {detail}"


def write_report(sections: Sequence[Section], machine: Machine, output: Path) -> None:
    """Write report.json and report.html."""
    data = {
        "format": 1,
        "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": machine.device,
        "devices": machine.count,
        "rehearsal": machine.quick,
        "sections": [section.as_data() for section in sections],
    }
    (output / "report.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (output / "report.html").write_text(page(sections, machine), encoding="utf-8")


def page(sections: Sequence[Section], machine: Machine) -> str:
    """Return the report as one HTML page without references to other files."""
    what = f"{machine.count} x {machine.device}"
    rehearsal = (
        "<p>A rehearsal on the CPU at small sizes: it says nothing about a GPU.</p>" if machine.quick else ""
    )
    body = "".join(_section(section) for section in sections)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>megamoe GPU check</title><style>{STYLE}</style>"
        f"<h1>megamoe GPU check: {html.escape(what)}</h1>{rehearsal}{body}</html>\n"
    )


def _section(section: Section) -> str:
    reason = f"<p>{html.escape(section.reason)}</p>" if section.reason else ""
    table = "".join(_row(finding) for finding in section.findings)
    heading = f'{html.escape(section.name)}: <span class="{section.status}">{section.status}</span>'
    return f"<h2>{heading}</h2>{reason}<table>{table}</table>"


def _row(finding: Finding) -> str:
    mark = {True: '<span class="passed">passed</span>', False: '<span class="failed">failed</span>'}
    verdict = "" if finding.holds is None else mark[finding.holds]
    value = f"{number(finding.value)} {finding.unit}".strip()
    return (
        f'<tr><td>{html.escape(finding.name)}</td><td class="value">{html.escape(value)}</td>'
        f'<td>{verdict}</td><td class="note">{html.escape(finding.note)}</td></tr>'
    )


def number(value: float | str) -> str:
    """Return a value as the report shows it: four significant digits, text as it is."""
    return value if isinstance(value, str) else f"{value:.4g}"
