"""Console output of a run: a table at the start, then one live line.

On a terminal the line updates in place and everything else scrolls above it; elsewhere (a batch
job's log file) plain lines appear now and then, so that the file stays readable.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megamoe.metrics import names
from megamoe.metrics.formats import format_duration

MIN_SECONDS_BETWEEN_LINES = 2.0
RATE_WINDOW = 20  # updates over which the speed for the ETA is taken


def print_summary(rows: Mapping[str, Sequence[tuple[str, object]]], console: Console | None = None) -> None:
    """Print sections of (label, value): a rich table on a terminal, aligned plain text elsewhere."""
    console = console or Console()
    if not console.is_terminal:
        width = max((len(label) for section in rows.values() for label, _ in section), default=0)
        for title, section in rows.items():
            _print_plain(console, title)
            for label, value in section:
                _print_plain(console, f"  {label:<{width}}  {value}")
        return
    table = Table(show_header=False, border_style="dim", padding=(0, 1))
    table.add_column(style="bold cyan")
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for title, section in rows.items():
        for index, (label, value) in enumerate(section):
            table.add_row(Text(title if index == 0 else ""), Text(label), Text(str(value)))
        table.add_section()
    console.print(table)


class ProgressLine(AbstractContextManager["ProgressLine"]):
    """The live line of a run: `step 120/400 | loss 4.213 | ... | ETA 3m12s`.

    Without a terminal the first and the last update and those with a validation loss are printed, and between
    them one every `every` steps, but not more often than every two seconds. The live line keeps the last
    validation loss with its step: `val 4.310 (step 118)`. `imbalance` and `dropped` are of the worst layer;
    the load does not count dropped pairs. `clock` gives seconds.
    """

    def __init__(
        self,
        total_steps: int,
        every: int = 1,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps, self._every, self._clock = total_steps, every, clock
        self._console = console or Console()
        self._recent: deque[tuple[int, float]] = deque(maxlen=RATE_WINDOW + 1)
        self._val, self._val_step = "", 0  # the last validation loss as text, and its step
        self._line = ""
        self._printed: tuple[int, float] | None = None  # step and time of the last plain line
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Show a step's metrics (keys as in the record; only `step` is required)."""
        step, now = int(metrics[names.STEP]), self._clock()
        self._recent.append((step, now))
        val = _validation(metrics)
        if val is not None:
            self._val, self._val_step = val, step
        self._line = self._render(metrics)
        if self._live is not None:
            self._live.update(Text(self._line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif val is not None or self._is_due(step, now):
            _print_plain(self._console, self._line)
            self._printed = (step, now)

    def close(self) -> None:
        """Leave the last line standing and release the terminal; a second call does nothing."""
        if self._live is not None:
            self._live.stop()
        elif self._recent and self._printed is not None and self._printed[0] != self._recent[-1][0]:
            _print_plain(self._console, self._line)
        self._recent.clear()

    def __exit__(self, *_: object) -> None:
        self.close()

    def eta_s(self) -> float | None:
        """Return the seconds to the last step at the speed of the recent updates; None before two of them."""
        if len(self._recent) < 2:
            return None
        (first_step, first_time), (last_step, last_time) = self._recent[0], self._recent[-1]
        if last_step <= first_step:
            return None
        return (self._total_steps - last_step) * (last_time - first_time) / (last_step - first_step)

    def _is_due(self, step: int, now: float) -> bool:
        if self._printed is None or step >= self._total_steps:
            return True
        printed_step, printed_time = self._printed
        return step - printed_step >= self._every and now - printed_time >= MIN_SECONDS_BETWEEN_LINES

    def _render(self, metrics: Mapping[str, Any]) -> str:
        eta_s = self.eta_s()
        shown = [
            ("step {}", f"{metrics['step']}/{self._total_steps}"),
            ("loss {:.3f}", metrics.get(names.LM_LOSS)),
            ("{}", self._shown_validation(int(metrics[names.STEP]))),
            ("lr {:.1e}", metrics.get(names.LR)),
            ("{:,.0f} tok/s", metrics.get(names.TOKENS_PER_S)),
            ("imbalance {:.2f}", names.worst_of_layers(metrics, names.IMBALANCE)),
            ("dropped {:.1%}", names.worst_of_layers(metrics, names.DROPPED) or None),
            ("ETA {}", None if eta_s is None else format_duration(eta_s)),
        ]
        return " | ".join(pattern.format(value) for pattern, value in shown if value is not None)

    def _shown_validation(self, step: int) -> str | None:
        """Return the validation loss of this step; the live line also shows an earlier one, with its step."""
        if self._val and self._val_step == step:
            return self._val
        return f"{self._val} (step {self._val_step})" if self._val and self._live is not None else None


def _validation(metrics: Mapping[str, Any]) -> str | None:
    """Return the validation loss of a step as text: of the main set, or of the first further one by name."""
    key = names.validation_key(metrics)
    if key is None:
        return None
    name = "" if key == names.VAL_LM_LOSS else f" {key.split('/')[1]}"
    return f"val{name} {metrics[key]:.3f}"


def _print_plain(console: Console, line: str) -> None:
    """Print a line without wrapping or colours, and flush it."""
    console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.file.flush()
