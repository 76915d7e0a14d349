"""Every system and many layouts on the pretended device: long, so a part of make test-full."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megamoe.config import load_config, to_dict
from tests.cuda.runs import Found, Run, assert_as_on_cpu, run_on_cpu, run_on_device
from tests.cuda.training import SMALL
from tests.support.ranks.matrix import few_cases
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import DS_CONFIGS, ds_config, ds_variant, small_run

ROOT = Path(__file__).resolve().parents[2]
PRESETS = sorted((ROOT / "examples/presets").glob("*.yaml"))
LAYOUTS = few_cases()
OVERLAPPING = [f"zero{stage}_{precision}" for stage in (1, 2, 3) for precision in ("fp32", "bf16")]
SHORT = ["data.mock=true", "data.sources=[]", "data.sequence_length=32", "data.workers=0"]
SHORT += ["model.vocab_size=96", "model.cpu_kernels=plain", "model.gpu_kernels=plain", "train.steps=3"]
SHORT += ["train.micro_batch_size=4", "train.global_batch_size=8", "optimizer.warmup_steps=0"]
SHORT += ["evaluation.batches=1", "log.report=false"]


def preset_runs(folder: Path) -> list[Run]:
    """Each run of examples/presets on one rank, and with its experts on two."""
    return [
        Run(to_dict(load_config(path, [*SHORT, f"name={path.stem}_{n}", f"parallel.expert={n}"])), n)
        for path in PRESETS
        for n in (1, 2)
    ]


def layout_runs(folder: Path) -> list[Run]:
    """The layouts of the matrix of tests/distributed, each as a run of three steps."""
    runs = []
    for place, case in enumerate(LAYOUTS):
        own = folder / f"layout_{place}"
        own.mkdir()
        tree = to_dict(small_run(**case.changes(own), name=f"layout_{place}", **_plain()))
        runs.append(Run(tree, case.ranks))
    return runs


def overlapping_runs(folder: Path) -> list[Run]:
    """DeepSpeed's own streams at each stage, on two ranks; ZeRO with and without the optimiser offloaded."""
    runs = []
    for file in [*OVERLAPPING, "zero1_bf16_offload", "zero2_bf16_offload"]:
        path = ds_variant(folder, file, zero_optimization={"overlap_comm": True})
        changes: dict[str, Any] = {"parallel__deepspeed": path, "parallel__expert": 2}
        changes["name"] = f"overlapping_{file}"
        runs.append(Run(to_dict(small_run(**changes, **_plain())), 2))
    return runs


def runs_of_files(folder: Path) -> list[Run]:
    """Each file of ds_configs for CUDA as it is, on two ranks that both hold all experts."""
    names = sorted(path.stem for path in DS_CONFIGS.glob("*_cuda.json"))
    assert len(names) >= 5
    return [
        Run(to_dict(small_run(name=name, parallel__deepspeed=ds_config(name), **_plain())), 2)
        for name in names
    ]


def _plain() -> dict[str, Any]:
    return {
        "model__cpu_kernels": "plain",
        "model__gpu_kernels": "plain",
        "train__steps": SMALL["train"]["steps"],
        "log__report": False,
    }


@pytest.mark.full
@pytest.mark.parametrize("runs_in", [preset_runs, layout_runs, runs_of_files, overlapping_runs])
def test_runs_are_the_same_as_on_the_cpu(
    runs_in: Callable[[Path], list[Run]], pool: Pool, tmp_path: Path
) -> None:
    """Every run with the CPU's; all problems together."""
    runs = runs_in(tmp_path)
    found: dict[str, Found] = run_on_device(runs, tmp_path)
    on_cpu = run_on_cpu(pool, runs)
    problems = []
    for run in runs:
        try:
            assert_as_on_cpu(found[run.name], on_cpu[run.name])
        except AssertionError as error:
            problems.append(f"{run.name} on {run.ranks} ranks: {str(error)[-2000:]}")
    assert not problems, "\n".join(problems)
