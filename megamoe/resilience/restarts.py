"""Recognising ranks that torchrun restarted after a crash (--max-restarts).

A restarted rank gets the same command line. Its run's folder exists because this launch made it, and
`overwrite=true` was applied already. So it resumes from the last checkpoint, or starts from scratch if there
is none. The folder's launch.json identifies the launch: torchrun's run id, which is mostly "none", and its
agents. An agent is the parent process of the ranks of one machine.
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
    """One call of torchrun. latest: the name and time of the folder's newest checkpoint when it started."""

    run_id: str
    agents: list[dict[str, Any]]
    latest: Mark | None

    @classmethod
    def gathered(cls, latest: Path | None) -> "Launch | None":
        """Return this launch, or None if it is not torchrun's, whose ranks nobody restarts. Collective."""
        run_id = _run_id()
        own_agent = None if run_id is None else _agent()
        marked = mark(latest)  # before the collective: after it the first rank may move the folder
        agents = [agent for agent in gather_from_ranks(own_agent) if agent is not None]
        if run_id is None:
            return None
        return cls(run_id, [agent for n, agent in enumerate(agents) if agent not in agents[:n]], marked)

    @classmethod
    def restarted(cls, folder: Path) -> "Launch | None":
        """Return the launch that made the folder, if it has restarted this process; else None."""
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            return None
        try:
            launch = cls(**json.loads((folder / LAUNCH).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return launch if launch.run_id == _run_id() and _agent() in launch.agents else None

    def dump(self) -> str:
        """Return the content of launch.json."""
        return json.dumps(asdict(self), indent=1)


def mark(checkpoint: Path | None) -> Mark | None:
    """Return what identifies a checkpoint: its name and time, for its step may be saved again."""
    return None if checkpoint is None else [checkpoint.name, checkpoint.stat().st_mtime_ns]


def _run_id() -> str | None:
    return os.environ.get("TORCHELASTIC_RUN_ID")


def _agent() -> dict[str, Any]:
    return Process.of(os.getppid()).to_dict()
