"""What a section finds, and what it is told."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "measured", "skipped", "error"]


@dataclass(frozen=True)
class Machine:
    """Where a section runs.

    device: `cuda` or `cpu`. count: devices, or on the CPU processes. quick: small sizes, for a rehearsal.
    """

    device: Literal["cuda", "cpu"]
    count: int
    quick: bool


@dataclass(frozen=True)
class Finding:
    """One measured value.

    holds: whether it is what is required; None if nothing is required of it.
    note: the requirement, or how the value was worked out.
    """

    name: str
    value: float | str
    unit: str = ""
    holds: bool | None = None
    note: str = ""


@dataclass
class Section:
    """The findings of a section, in the order of the report. reason: why it was skipped or ended early."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    reason: str = ""
    status: Status = "measured"

    def add(
        self, name: str, value: float | str, unit: str = "", holds: bool | None = None, note: str = ""
    ) -> None:
        """Add a finding."""
        self.findings.append(Finding(name, value, unit, holds, note))

    def judge(self) -> None:
        """Set the status by the findings, unless the section was skipped or ended with an error."""
        if self.status in ("skipped", "error"):
            return
        judged = [finding.holds for finding in self.findings if finding.holds is not None]
        self.status = ("passed" if all(judged) else "failed") if judged else "measured"

    def as_data(self) -> dict[str, Any]:
        """Return the section as plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> "Section":
        """Return the section that `as_data` wrote."""
        findings = [Finding(**each) for each in data["findings"]]
        return cls(data["name"], findings, data["reason"], data["status"])


class Skip(Exception):
    """A section does not apply to this machine; the message has the reason."""
