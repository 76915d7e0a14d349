"""Starts runs on the pretended device: one process a rank, and all runs in the same processes."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from megamoe.cpu_kernels.build import BuildError
from megamoe.parallel.launch import free_port
from tests.cuda.build import built
from tests.cuda.pretended import FAULTS
from tests.cuda.training import MEASURED, Tree
from tests.support.ranks.pool import Pool

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 1800
OF_THE_CPU = ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES")  # variables that the tests on the CPU set


@dataclass(frozen=True)
class Run:
    """A run's configuration on so many ranks. fault: the method of torch.cuda.Stream that does nothing."""

    tree: Tree
    ranks: int = 1
    fault: str | None = None

    @property
    def name(self) -> str:
        return str(self.tree["name"])


@dataclass
class Found:
    """What each rank found in a run, by the keys of `rank.Watch.found`."""

    run: Run
    of_rank: list[dict[str, Any]]

    def losses(self) -> dict[str, list[float]]:
        """The first rank's, who writes the metrics."""
        return self.of_rank[0]["losses"]

    def all_of(self, key: str) -> list[str]:
        """The findings of all ranks."""
        return [text for found in self.of_rank for text in found[key]]

    def errors(self) -> str:
        return "\n".join(found["error"] for found in self.of_rank)

    def step(self) -> dict[str, Any]:
        """The measured step of the first rank."""
        return self.of_rank[0]["steps"][MEASURED - 1]


def library_or_skip() -> None:
    """Build the device; skip the test, with the reason, where that is not possible."""
    try:
        built()
    except BuildError as error:
        pytest.skip(f"the pretended device cannot be built: {error}")


def run_on_device(
    runs: list[Run], folder: Path, devices: int = 4, variables: dict[str, str] | None = None
) -> dict[str, Found]:
    """Train each run; what was found, by the runs' names.

    variables: of the environment of every rank, beside what a launcher sets.
    """
    library_or_skip()
    runs = sorted(runs, key=lambda run: -run.ranks)
    ranks = runs[0].ranks
    job = folder / "job.json"
    content = {"runs": [asdict(run) for run in runs], "devices": devices, "port": free_port()}
    job.write_text(json.dumps({**content, "variables": variables or {}}))
    environment = {name: value for name, value in os.environ.items() if name not in OF_THE_CPU}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOCAL_SIZE": "1"}
    logs = [folder / f"{rank}.log" for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.cuda.rank", str(job), str(rank)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=log.open("w"),
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * ranks, "\n".join(log.read_text()[-4000:] for log in logs)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {run.name: Found(run, [found[rank][run.name] for rank in range(run.ranks)]) for run in runs}


def run_on_cpu(pool: Pool, runs: list[Run]) -> dict[str, dict[str, list[float]]]:
    """The losses of the same runs on the CPU, by their names."""
    from tests.cuda.training import run_all

    losses: dict[str, dict[str, list[float]]] = {}
    for ranks in sorted({run.ranks for run in runs}):
        mine = [run for run in runs if run.ranks == ranks]
        first, *_ = pool.run(run_all, [run.tree for run in mine], ranks=ranks, timeout_s=TIMEOUT_S)
        losses |= {run.name: found for run, found in zip(mine, first, strict=True)}
    return losses


def assert_as_on_cpu(found: Found, expected: dict[str, list[float]]) -> None:
    """No error, none of `pretended.FAULTS`, and the CPU's losses.

    In bf16 sums of other orders round otherwise, and a token whose scores nearly tie may choose another
    expert, which the norm of the gradients shows most.
    """
    name = f"{found.run.name} on {found.run.ranks} ranks"
    assert not found.errors().strip(), f"{name}:\n{found.errors()}"
    for kind in FAULTS:
        assert not found.all_of(kind), f"{name}: {kind}:\n" + "\n".join(found.all_of(kind))
    assert expected["train/lm_loss"], f"{name}: the run on the CPU has no losses"
    in_bf16 = "bf16" in str(found.run.tree.get("parallel", {}).get("deepspeed"))
    for word, values in expected.items():
        rounded = 2e-2 if word == "train/grad_norm" else 5e-3
        tolerance = rounded if in_bf16 else 1e-5
        got = found.losses()[word]
        message = f"{name}: {word} is {got}, on the CPU {values}, tolerance {tolerance:g}"
        assert got == pytest.approx(values, rel=tolerance), message
