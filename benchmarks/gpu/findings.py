"""What a section finds, and what it is told."""

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megamoe.apps.plan.assumptions import ASSUMED, Rate
from megamoe.io import replace_file

Status = Literal["passed", "failed", "measured", "skipped", "error"]


SLOWER = 4  # a rehearsal shares its machine with other work


@dataclass(frozen=True)
class Machine:
    """Where a section runs.

    device: `cuda` or `cpu`. count: devices, or on the CPU processes. quick: small sizes, for a rehearsal.
    logs: the folder of the error output of its processes; default: one that the system empties. section: its
    name, with which their names begin.
    """

    device: Literal["cuda", "cpu"]
    count: int
    quick: bool
    logs: str = ""
    section: str = "check"

    def limit(self, seconds: float) -> float:
        """Return the most seconds that a process may take which has so many on a GPU."""
        return SLOWER * seconds if self.quick else seconds

    def next_log(self, name: str) -> Path:
        """Return a path in the folder of logs that is not yet used."""
        folder = Path(self.logs or tempfile.gettempdir())
        folder.mkdir(parents=True, exist_ok=True)
        number, path = tempfile.mkstemp(".log", f"{self.section}_{name}_", folder)
        os.close(number)
        return Path(path)


@dataclass(frozen=True)
class Finding:
    """One measured value.

    holds: whether it is what is required; None if nothing is required of it.
    note: the requirement, or how the value was worked out. assumption: kind, phase and size of the row of the
    plan's assumptions (`megamoe.apps.plan.assumptions.Rate`) of which this is the measured value.
    """

    name: str
    value: float | str
    unit: str = ""
    holds: bool | None = None
    note: str = ""
    assumption: tuple[str, str, float] | None = None


@dataclass
class Section:
    """The findings of a section, in the order of the report. reason: why it was skipped or ended early.

    path: where it is written after each finding, so that what ends the process leaves what was found.
    """

    name: str
    findings: list[Finding] = field(default_factory=list)
    reason: str = ""
    status: Status = "measured"
    path: Path | None = None

    def add(
        self, name: str, value: float | str, unit: str = "", holds: bool | None = None, note: str = ""
    ) -> None:
        """Add a finding."""
        self._append(Finding(name, value, unit, holds, note))

    def expect(self, kind: str, size: float, phase: str, found: float, note: str = "") -> None:
        """Add the measured value of an assumption: of the row for that size and phase."""
        fitting = [row for row in ASSUMED.rows if row.kind == kind and row.phase == phase]
        row = max((row for row in fitting if row.at_least <= size), key=lambda row: row.at_least)
        shown = Rate(row.kind, row.phase, row.at_least, found, "").shown()
        name = f"{row.name}: expected {row.shown()}, found {shown}"
        self._append(Finding(name, found, "", None, note, row.key))

    def _append(self, finding: Finding) -> None:
        self.findings.append(finding)
        self.write()

    def write(self) -> None:
        """Write the section to its file, as a whole, if it has one."""
        if self.path is not None:
            replace_file(self.path, json.dumps(self.as_data()).encode())

    def judge(self) -> None:
        """Set the status by the findings, unless the section was skipped or ended with an error."""
        if self.status in ("skipped", "error"):
            return
        judged = [finding.holds for finding in self.findings if finding.holds is not None]
        self.status = ("passed" if all(judged) else "failed") if judged else "measured"

    def as_data(self) -> dict[str, Any]:
        """Return the section as plain data, for JSON."""
        return {key: value for key, value in asdict(self).items() if key != "path"}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> "Section":
        """Return the section that `as_data` wrote."""
        rows = [each["assumption"] and tuple(each["assumption"]) for each in data["findings"]]
        findings = [
            Finding(**{**f, "assumption": row}) for f, row in zip(data["findings"], rows, strict=True)
        ]
        return cls(data["name"], findings, data["reason"], data["status"])


class Skip(Exception):
    """A section does not apply to this machine; the message has the reason."""
