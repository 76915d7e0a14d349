"""Runs the entry script on the pool's ranks, and returns exit codes and output when something goes wrong."""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megamoe.config import dump_yaml
from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool, RankError
from tests.support.tiny import tiny

Fault = Callable[[Trainer], None]


@dataclass
class Exits:
    """Exit codes (negative: killed by that signal) and stdout with stderr, by rank."""

    codes: list[int]
    outputs: list[str]

    def errors(self) -> list[list[str]]:
        """Return the lines of errors and tracebacks, by rank."""
        words = ("error: ", "Traceback", "  File ", "[rank")
        return [[line for line in text.splitlines() if line.startswith(words)] for text in self.outputs]


def train_and_exit(
    folder: str, arguments: list[str], by_rank: dict[int, list[str]], fault: Fault | None
) -> None:
    """Job: do what `python pretrain_gpt_moe.py` does, and exit. `fault` is called before each step."""
    import pretrain_gpt_moe
    from megamoe.resilience import error_reporting, watchdog

    output = os.open(f"{folder}/rank_{os.environ['RANK']}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    error_reporting.FIRST_RANK_WAIT_S, watchdog.GRACE_S, watchdog.DUMP_S, watchdog.PRINTING_S = 1, 2.5, 2, 5
    if fault is not None:
        step = Trainer.step

        def step_with_fault(self: Trainer) -> object:
            fault(self)
            return step(self)

        Trainer.step = step_with_fault  # type: ignore[assignment, method-assign]
    own = by_rank.get(int(os.environ["RANK"]), [])
    sys.argv = ["pretrain_gpt_moe.py", "--config", f"{folder}/run.yaml", *arguments, *own]
    error_reporting.exit_process(pretrain_gpt_moe.main())


def run_entry_script(
    pool: Pool,
    folder: Path,
    *arguments: str,
    by_rank: dict[int, list[str]] | None = None,
    fault: Fault | None = None,
    ranks: int = 2,
    timeout_s: float = 60,
) -> Exits:
    """Train tiny(output=<folder>/runs, name=a, ...) with `arguments` until every rank has exited.

    by_rank: further arguments of single ranks. fault: called before each step, on every rank.
    """
    (folder / "run.yaml").write_text(dump_yaml(tiny(f"output={folder}/runs", "name=a", "train.steps=8")))
    with pytest.raises(RankError) as ended:
        job = (train_and_exit, str(folder), list(arguments), by_rank or {}, fault)
        pool.run(*job, ranks=ranks, timeout_s=timeout_s)
    found = re.findall(r"--- rank (\d+)\nthe process died with exit code (-?\d+)", str(ended.value))
    codes = {int(rank): int(code) for rank, code in found}
    outputs = [(folder / f"rank_{rank}.txt").read_text() for rank in range(ranks)]
    assert len(codes) == ranks, "\n".join([str(ended.value), *outputs])
    return Exits([codes[rank] for rank in range(ranks)], outputs)
