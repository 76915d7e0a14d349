"""The sections by name, and the report of what they found."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpu import attention, collectives, comparisons, environment, extensions, kernels, parity, rates, training
from gpu.findings import Machine, Section
from gpu.probes import PROBES
from megamoe.apps.plan.assumptions import Rate
from megamoe.io import replace_file

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
    **{name: Task(run, 180) for name, run in PROBES.items()},
}


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
    """Write report.json and assumptions.json."""
    data = {
        "format": 1,
        "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": machine.device,
        "devices": machine.count,
        "rehearsal": machine.quick,
        "sections": [section.as_data() for section in sections],
    }
    contents = {"report.json": data, "assumptions.json": assumptions(sections, machine)}
    for name, content in contents.items():
        replace_file(output / name, (json.dumps(content, indent=1) + "\n").encode())


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
