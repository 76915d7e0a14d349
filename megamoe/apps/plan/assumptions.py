"""What share of a peak is reached, and what a launch and a wait cost: a table with a source for each row.

The table is `rates.json`. `make gpu-check` writes a file of measured rows, which `tools/plan.py
--assumptions` puts in place of the table's.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megamoe.apps.command import json_of
from megamoe.errors import UserError

Case = Literal["pessimistic", "likely", "optimistic"]
CASES: tuple[Case, ...] = ("pessimistic", "likely", "optimistic")
TABLE = Path(__file__).with_name("rates.json")
MOST_BYTES = 1 << 20
SECONDS = ("kernel_s", "sync_s", "collective_s", "peer_s", "aten_call_s", "own_call_s", "collective_call_s")
SHARES = ("attention", "matmul", "grouped", "link", "network", "bytes", "scattered_bytes", "hidden")
PHASES = ("", "forward", "backward")
# What `at_least` of a kind bounds; nothing for the other kinds.
SIZES = {
    "attention": "head size",
    "matmul": "smallest dimension",
    "grouped": "smallest dimension of a weight",
    "link": "bytes a call",
    "network": "bytes a call",
}


@dataclass(frozen=True)
class Rate:
    """One row: a share of a peak, or seconds, for sizes from `at_least` on (see SIZES).

    phase: forward or backward; empty for both. source: where the value is from.
    """

    kind: str
    phase: str
    at_least: float
    value: float
    source: str

    @property
    def key(self) -> tuple[str, str, float]:
        """What the row is for."""
        return self.kind, self.phase, self.at_least

    @property
    def name(self) -> str:
        """For a reader: `attention, head size from 128, forward`."""
        size = f", {SIZES[self.kind]} from {self.at_least:,g}" if self.kind in SIZES else ""
        return f"{self.kind}{size}" + (f", {self.phase}" if self.phase else "")

    def shown(self) -> str:
        """The value with its unit."""
        return f"{self.value * 1e6:g} us" if self.kind in SECONDS else f"{self.value:.1%}"


@dataclass(frozen=True)
class Assumptions:
    """The rows of one case. matmul, grouped, attention: of the peak FLOP/s. bytes, scattered_bytes: of the
    memory bandwidth, by passes over whole tensors and by rows at random places. link, network: of the
    bandwidth of the links inside a node and between nodes. hidden: of a collective beside the backward pass.
    kernel_s: between two kernels. sync_s: a wait of the host and until the next kernel. collective_s, peer_s:
    start of a collective, and for each rank of another node of an all-to-all. aten_call_s, own_call_s,
    collective_call_s: the host's time of a call.
    """

    case: Case
    rows: tuple[Rate, ...]

    def of(self, kind: str, size: float = 0.0, phase: str = "") -> float:
        """Return the value for that size and phase: of the last row that it reaches."""
        fitting = [row for row in self.rows if row.kind == kind and row.phase in ("", phase)]
        reached = [row for row in fitting if row.at_least <= size] or fitting
        return max(reached, key=lambda row: row.at_least).value

    @property
    def link(self) -> float:
        """The share of the bandwidth of links inside a node that large messages reach."""
        return self.of("link", float("inf"))

    @property
    def network(self) -> float:
        """The share of the bandwidth of links between nodes that large messages reach."""
        return self.of("network", float("inf"))

    def __getattr__(self, name: str) -> float:
        """Return a value that does not depend on a size."""
        if name in SIZES or name not in (*SECONDS, *SHARES):
            raise AttributeError(name)
        return self.of(name)

    def changed(self, measured: tuple[Rate, ...]) -> "Assumptions":
        """Return these with the measured rows in their places."""
        rows = {row.key: row for row in (*self.rows, *measured)}
        return replace(self, rows=tuple(rows.values()))

    def lines(self) -> list[str]:
        """For a reader of the figures."""
        return [
            *(f"{row.name}: {row.shown()}: {row.source}" for row in self.rows),
            "no collective runs beside other work, but rows travel to the experts beside shared experts, "
            "their gradients beside these and the experts' weight gradients; with train.in_flight=2 a pass "
            "lasts as long as the longer of what is computed and what else travels, in all but recomputed "
            "blocks",
            "an operator reads its arguments once and writes its results once, unless "
            "megamoe/apps/plan/operators.py says otherwise; views cost nothing; TF32 is off",
            "model FLOPs: 3 x the matrix products of one forward pass under a balanced load",
        ]


def of_case(case: Case) -> Assumptions:
    """Return the table's values of a case."""
    table: list[dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
    rows = [Rate(row["kind"], row["phase"], row["at_least"], row[case], row["source"]) for row in table]
    return Assumptions(case, tuple(rows))


PESSIMISTIC, ASSUMED, OPTIMISTIC = map(of_case, CASES)


def read(path: str) -> tuple[Rate, ...]:
    """Return the rows of a file of measured ones: a JSON object whose list `rates` has the fields of `Rate`.

    Raises:
        UserError: for a file that is not such a list, naming the row.
    """
    found = json_of("--assumptions", Path(path), MOST_BYTES)
    if isinstance(found, dict) and found.get("rehearsal"):
        raise UserError(f"--assumptions: {path}: a rehearsal at small sizes; expected a check of a GPU")
    rows = found.get("rates") if isinstance(found, dict) else None
    if not isinstance(rows, list):
        raise UserError(f"--assumptions: {path}: expected an object with a list `rates`")
    return tuple(_row(path, number, row) for number, row in enumerate(rows))


def _row(path: str, number: int, row: Any) -> Rate:
    expected = {"kind", "phase", "at_least", "value", "source"}
    where = f"--assumptions: {path}: rates[{number}]"
    if not isinstance(row, dict) or row.keys() != expected:
        raise UserError(f"{where}: expected an object with {', '.join(sorted(expected))}")
    if row["kind"] not in (*SECONDS, *SHARES):
        raise UserError(
            f"{where}: kind: found {row['kind']!r}, expected one of {', '.join((*SHARES, *SECONDS))}"
        )
    if row["phase"] not in PHASES or not isinstance(row["source"], str):
        raise UserError(f"{where}: expected the phase forward, backward or nothing, and a text as source")
    most = 1.0 if row["kind"] in SECONDS else 2.0
    for key, least, top in (("at_least", 0, 1e18), ("value", 1e-9, most)):
        value = row[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= top:
            raise UserError(f"{where}: {key}: found {value!r}, expected a number from {least:g} to {top:g}")
    return Rate(row["kind"], row["phase"], float(row["at_least"]), float(row["value"]), row["source"])
