"""The sections by name, and the report of what they found."""

import html
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpu import attention, collectives, comparisons, environment, extensions, kernels, parity, rates, training
from gpu.findings import Finding, Machine, Section
from megamoe.apps.plan.assumptions import Rate

SLOWER = 10  # a section of a rehearsal, which shares its machine with other work


@dataclass(frozen=True)
class Task:
    """What a section runs, and the most seconds that it may take."""

    run: Callable[[Machine, Section], None]
    seconds: float

    def limit(self, machine: Machine) -> float:
        """Return the most seconds on this machine."""
        return SLOWER * self.seconds if machine.quick else self.seconds


# In the order of what a single slot of ten minutes must not miss. Each family of kernels has a process of its
# own: an illegal address ends all that a process still has to do. The least certain kernels come first.
SECTIONS: dict[str, Task] = {
    "environment": Task(environment.run, 30),
    "training": Task(training.run, 200),
    "host": Task(training.run_host, 60),
    **{f"kernels_{name}": Task(partial(kernels.run, family=name), 45) for name in kernels.FAMILIES},
    "attention": Task(attention.run, 40),
    "rates": Task(rates.run, 60),
    "collectives": Task(collectives.run, 60),
    "parity": Task(parity.run, 150),
    "tiles": Task(kernels.run_tiles, 120),
    "transformer_engine": Task(extensions.run, 400),
    "layer": Task(comparisons.run_layer, 150),
    "step": Task(comparisons.run_step, 150),
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
    lines = [f"  {finding.name}" for finding in section.findings if finding.assumption is not None]
    return "\n".join([*lines, f"{section.name}: {section.status}: {detail}"])


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
    _write(output / "report.json", json.dumps(data, indent=1) + "\n")
    _write(output / "assumptions.json", json.dumps(assumptions(sections, machine), indent=1) + "\n")
    _write(output / "report.html", page(sections, machine))


def _write(path: Path, text: str) -> None:
    """Write a file as a whole."""
    partial_file = path.with_name(f"{path.name}.partial")
    partial_file.write_text(text, encoding="utf-8")
    partial_file.replace(path)


def assumptions(sections: Sequence[Section], machine: Machine) -> dict[str, Any]:
    """Return the measured rows of the plan's assumptions, for `tools/plan.py --assumptions`."""
    rows = {
        finding.assumption: finding
        for section in sections
        for finding in section.findings
        if finding.assumption is not None and isinstance(finding.value, float)
    }
    measured = [
        asdict(Rate(*key, float(finding.value), f"make gpu-check: {finding.note}"))  # type: ignore[arg-type]
        for key, finding in rows.items()
    ]
    return {"rehearsal": machine.quick, "rates": measured}


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
