"""What share of a peak is reached, and what a launch and a wait cost: a table with a source for each row.

The table is `rates.json`. `make gpu-check` writes a file of measured rows, which `tools/plan.py
--assumptions` puts in place of the table's.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, TypeAdapter, ValidationError

from megamoe.apps.command import json_of
from megamoe.config.parts import STRICT
from megamoe.errors import UserError
from megamoe.io import reason

Case = Literal["pessimistic", "likely", "optimistic"]
CASES: tuple[Case, ...] = ("pessimistic", "likely", "optimistic")
TABLE = Path(__file__).with_name("rates.json")
MOST_BYTES = 1 << 20
Seconds = Literal[
    "kernel_s", "sync_s", "collective_s", "peer_s", "aten_call_s", "own_call_s", "collective_call_s"
]
Share = Literal["attention", "matmul", "grouped", "link", "network", "bytes", "scattered_bytes", "hidden"]
Kind = Seconds | Share
Phase = Literal["", "forward", "backward"]
SECONDS, SHARES = get_args(Seconds), get_args(Share)
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

    __pydantic_config__ = STRICT
    kind: Kind
    phase: Phase
    at_least: Annotated[float, Field(ge=0, le=1e18)]
    value: Annotated[float, Field(ge=1e-9, le=2)]
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

    def __getattr__(self, name: str) -> float:
        """Return the value of a kind for large sizes, such as those of large messages."""
        if name not in (*SECONDS, *SHARES):
            raise AttributeError(name)
        return self.of(name, float("inf"))

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
    if not isinstance(found, dict) or "rates" not in found:
        raise UserError(f"--assumptions: {path}: expected an object with a list `rates`")
    try:
        return TypeAdapter(tuple[Rate, ...]).validate_json(json.dumps(found["rates"]))
    except ValidationError as error:
        raise UserError(f"--assumptions: {path}: rates: {reason(error)}") from None
