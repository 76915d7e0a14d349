"""How a run is, from the files in its folder alone: `tools/status.py` shows it."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megamoe.checkpoint.format.folder import candidates
from megamoe.errors import UserError, printable
from megamoe.io import METRICS_FILE, open_plain, parse_json, read_plain
from megamoe.metrics import names
from megamoe.metrics.formats import format_count, format_duration
from megamoe.redaction import redact_all
from megamoe.resilience.run_status import FAILURES, HEARTBEAT, INTERVAL_S, LAUNCHES, STACKS
from megamoe.resilience.stragglers import STRAGGLERS
from megamoe.resilience.watchdog import HEADING

Verdict = Literal["running", "hung", "finished", "stopped", "failed", "crashed", "not started"]
GONE_S = 6 * INTERVAL_S  # without a heartbeat the process is taken to be gone
HUNG_S = 60.0  # without progress, or ten steps if they take longer
TAIL = 1 << 22  # bytes of metrics.jsonl that are read
LARGEST = 1 << 22  # bytes of the other files
LARGEST_STACKS = 1 << 26
RECENT = 20  # steps whose median speed gives the time that is left


@dataclass
class RunReport:
    """How a run is.

    checkpoint: the name of the one that a resume tries first; ages in seconds. failures: of the last launch.
    stragglers: slow ranks, each with `rank`, `host`, and its time as `times` the median.
    """

    folder: Path
    verdict: Verdict
    reason: str = ""
    heartbeat_age_s: float | None = None
    silence_s: float | None = None
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    eta_s: float | None = None
    checkpoint: str | None = None
    checkpoint_age_s: float | None = None
    skipped_steps: int = 0
    launches: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    stragglers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_well(self) -> bool:
        """Whether nobody has to act."""
        return self.verdict in ("running", "finished", "stopped")


def read_status(folder: Path, now: float | None = None) -> RunReport:
    """Return how the run in a folder is. now: seconds since 1970, for tests.

    Raises:
        UserError: if the folder does not exist or cannot be read.
    """
    now = time.time() if now is None else now
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name a run's, runs/<name>")
    beat = _read_json(folder / HEARTBEAT)
    launches = [it for it in _lines(folder / LAUNCHES) if isinstance(it.get("time"), float)]
    since = launches[-1]["time"] if launches else 0.0
    found = [_read_json(path) for path in sorted((folder / FAILURES).glob("rank_*.json"))]
    failures = [it for it in found if it.get("time", 0) >= since]
    report = RunReport(folder, "not started", launches=launches, failures=failures)
    slow = _read_json(folder / STRAGGLERS).get("ranks")
    report.stragglers = [it for it in slow if isinstance(it, dict)] if isinstance(slow, list) else []
    _add_metrics(report, _lines(folder / METRICS_FILE))
    if saved := candidates(folder / "checkpoints"):
        report.checkpoint = saved[0].name
        report.checkpoint_age_s = max(0.0, now - saved[0].stat().st_mtime)
    if beat:
        _judge(report, beat, now)
    elif report.step:
        report.verdict, report.reason = "stopped", f"no {HEARTBEAT}: written by an earlier version"
    return report


def newest_checkpoint(folder: Path) -> str:
    """Return the checkpoint that a resume tries first with the time of its saving, or `none`."""
    found = candidates(folder / "checkpoints")
    return f"{found[0].name} {found[0].stat().st_mtime_ns}" if found else "none"


def is_complete(folder: Path, steps: int | None = None) -> bool:
    """Return whether the run's last launch has done the last step, and so many steps, if it is known."""
    beat = _read_json(folder / HEARTBEAT)
    return beat.get("state") == "finished" and (steps is None or int(beat.get("step", 0)) >= steps)


def as_text(report: RunReport) -> str:
    """Return the screen of `tools/status.py`."""
    last = report.launches[-1] if report.launches else {}
    started = f", the last at step {last['from_step']}" if last else ""
    saved = _shown(report.checkpoint_age_s, _ago)
    steps = f"{report.step}" if report.steps is None else f"{report.step} of {report.steps}"
    rows = [
        ("run", str(report.folder)),
        ("state", report.verdict + (f": {printable(report.reason)}" if report.reason else "")),
        ("step", steps),
        ("loss", _shown(report.loss, "{:.4f}".format)),
        ("tokens/s", _shown(report.tokens_per_s, format_count)),
        ("time left", _shown(report.eta_s, format_duration)),
        ("last progress", _shown(report.silence_s, _ago)),
        ("heartbeat", _shown(report.heartbeat_age_s, _ago)),
        ("checkpoint", ", ".join(filter(None, (report.checkpoint or "none", saved)))),
        ("skipped steps", str(report.skipped_steps)),
        ("restarts", str(max(0, len(report.launches) - 1)) + started),
        ("rank 0", ", ".join(f"{key} {last[key]}" for key in ("host", "pid", "job") if last.get(key))),
    ]
    further = [("straggler", it, f"{it.get('times')} times the median") for it in report.stragglers]
    further += [("failure", it, f"{it.get('reason')}") for it in report.failures]
    rows += [
        (name, printable(f"rank {it.get('rank')} on {it.get('host')}: {what}")) for name, it, what in further
    ]
    return "\n".join(f"{name:<14} {value}" for name, value in rows if value)


def _judge(report: RunReport, beat: dict[str, Any], now: float) -> None:
    state, age = beat.get("state"), max(0.0, now - float(beat.get("time", 0)))
    step = int(beat.get("step", 0))
    report.step = max(report.step, step) if state == "running" else step
    report.steps = beat.get("steps")
    if state in ("finished", "stopped", "failed"):
        report.verdict, report.reason = state, beat.get("reason") or ""
        return
    report.heartbeat_age_s, report.silence_s = age, age + float(beat.get("silence_s", 0))
    if age > GONE_S:
        report.verdict = "crashed"
        report.reason = "rank 0 ended without a report: it was killed, or its node is gone"
        if any(map(_is_of_watchdog, (report.folder / STACKS).glob("rank_*.txt"))):
            report.reason = f"no progress, ended by the watchdog; stacks: {report.folder / STACKS}"
        elif report.failures:
            report.reason = "a rank failed"
    elif report.silence_s > max(HUNG_S, 10 * (report.step_s or 0)):
        report.verdict = "hung"
        report.reason = f"rank 0 is alive and made no progress for {format_duration(report.silence_s)}"
    else:
        report.verdict = "running"
    if report.verdict == "running" and report.step_s is not None and report.steps is not None:
        report.eta_s = report.step_s * (report.steps - report.step)


def _is_of_watchdog(stacks: Path) -> bool:
    """Whether the watchdog has written into a rank's file, which each launch opens empty."""
    try:
        return HEADING.encode() in read_plain(stacks, LARGEST_STACKS)
    except (OSError, ValueError):
        return False


def _add_metrics(report: RunReport, records: list[dict[str, Any]]) -> None:
    steps = [record for record in records if isinstance(record.get(names.STEP_S), float)]
    if not steps:
        return
    last = steps[-1]
    report.step = int(last[names.STEP])
    loss = last.get(names.LM_LOSS)
    report.loss = float(loss) if isinstance(loss, int | float | str) else None
    report.tokens_per_s = statistics.median(float(it[names.TOKENS_PER_S]) for it in steps[-RECENT:])
    report.step_s = statistics.median(float(it[names.STEP_S]) for it in steps[-RECENT:])
    report.skipped_steps = int(last.get(names.SKIPPED_STEPS, 0))


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in the last lines of a JSONL file; broken lines are left out."""
    try:
        with open_plain(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL))
            lines = file.read(TAIL).split(b"\n")
    except (OSError, ValueError):
        return []
    return list(filter(None, map(_parse, lines[1:] if size > TAIL else lines)))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return _parse(read_plain(path, LARGEST))
    except (OSError, ValueError):
        return {}


def _parse(text: bytes) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError:
        return {}
    return redact_all(found) if isinstance(found, dict) else {}


def _shown(value: float | None, text: Callable[[float], str]) -> str:
    return "" if value is None else text(value)


def _ago(seconds: float) -> str:
    return f"{format_duration(seconds)} ago"
