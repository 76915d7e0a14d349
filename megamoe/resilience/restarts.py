"""Workers that torchrun starts again after a crash (--max-restarts): the same command line, another meaning.

`overwrite=true` has been obeyed and the run's folder is there because this launch made it, so such a start
goes on from the last checkpoint, or begins anew if there is none. The folder's launch.json says whose it is:
torchrun's run id, which is mostly "none", and its agents, the parents of the ranks, one on each machine.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megamoe.parallel.consensus import gather_from_ranks
from megamoe.resilience.processes import Process

LAUNCH = "launch.json"
Mark = list[str | int]


@dataclass(frozen=True)
class Launch:
    """One call of torchrun. latest: the folder's newest checkpoint when it began, by name and time."""

    run_id: str
    agents: list[dict[str, Any]]
    latest: Mark | None

    @classmethod
    def gathered(cls, latest: Path | None) -> "Launch | None":
        """This launch; None, where nobody starts ranks again. Collective."""
        run_id = _run_id()
        mine = None if run_id is None else _agent()
        marked = mark(latest)  # before the ranks have met: then the first may move the folder
        agents = [agent for agent in gather_from_ranks(mine) if agent is not None]
        if run_id is None:
            return None
        return cls(run_id, [agent for n, agent in enumerate(agents) if agent not in agents[:n]], marked)

    @classmethod
    def restarted(cls, folder: Path) -> "Launch | None":
        """The launch whose folder it is, if this process is of it and was started again by it."""
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            return None
        try:
            launch = cls(**json.loads((folder / LAUNCH).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return launch if launch.run_id == _run_id() and _agent() in launch.agents else None

    def dump(self) -> str:
        """As launch.json has it."""
        return json.dumps(asdict(self), indent=1)


def mark(checkpoint: Path | None) -> Mark | None:
    """By which a checkpoint is known: one of the same step may take its place."""
    return None if checkpoint is None else [checkpoint.name, checkpoint.stat().st_mtime_ns]


def _run_id() -> str | None:
    return os.environ.get("TORCHELASTIC_RUN_ID")


def _agent() -> dict[str, Any]:
    return Process.of(os.getppid()).plain()
