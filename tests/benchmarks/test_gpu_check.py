"""The GPU check: its judgements, its report, and a rehearsal on the CPU."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamoe.config import load_config
from megamoe.errors import UserError
from megamoe.parallel.zero.deepspeed_config import resolve_parallel
from megamoe.validation import backends as validation_of_backends
from megamoe.validation.run import validate

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("scripts")
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")


def record(loss: float, load: list[int]) -> dict[str, Any]:
    """What metrics.jsonl has of a step."""
    return {"train/lm_loss": loss, "train/loss": loss, "train/grad_norm": 1.0, "moe/layer_01/load": load}


@pytest.mark.parametrize(("count", "most"), [(1, 1), (2, 2), (3, 2), (4, 4), (8, 4)])
def test_two_layouts_that_fit_the_devices(count: int, most: int) -> None:
    from gpu.parity import layouts_for

    layouts = layouts_for(count)
    assert len(layouts) == len({layout.name for layout in layouts}) == 2
    assert layouts[0].name == "one rank, ZeRO 0"
    assert max(layout.ranks for layout in layouts) == most


def test_errors_are_relative_and_moved_pairs_are_counted_once() -> None:
    from gpu.parity import largest_error, moved_share

    reference, found = [record(4.0, [6, 2])], [record(4.002, [5, 3])]
    assert largest_error(reference, found) == pytest.approx(0.0005)
    assert moved_share(reference, found) == 1 / 8
    assert largest_error(reference, [*found, *found]) == largest_error([], []) == float("inf")


def test_transformer_engine_runs_in_bf16_and_in_every_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run's configuration fits one rank, but for what this machine lacks."""
    from gpu import extensions
    from gpu.findings import Machine, Section
    from gpu.training import CONFIG

    runs: list[tuple[str, list[str]]] = []

    def train(machine: Machine, ranks: int, config: str, overrides: list[str], *_: object) -> Any:
        runs.append((config, overrides))
        return [record(4.0 if len(runs) < 3 else 4.2, [4, 4])]

    def on_ranks(machine: Machine, ranks: int, section: str, given: dict[str, Any], limit: float) -> Any:
        runs.append((CONFIG, given["overrides"]))
        return {"seconds": [1.0], "losses": [4.0, 3.0], "tokens": 8, "peak_bytes": 1}

    monkeypatch.setattr(extensions, "train", train)
    monkeypatch.setattr(extensions, "on_ranks", on_ranks)
    monkeypatch.setattr(extensions, "find_transformer_engine", lambda: SimpleNamespace(problem=""))
    for module in (extensions, validation_of_backends):
        monkeypatch.setattr(module, "fp8_ability", lambda name: (name != "mxfp8", "not on this one"))
    section = Section("transformer_engine")
    extensions.run(Machine("cuda", 1, quick=False), section)
    scalings = ["bf16", "FP8, delayed", "FP8, tensorwise", "FP8, blockwise"]
    names = [finding.name for finding in section.findings]
    assert names == ["FP8, mxfp8", *scalings, *(f"{name}: step" for name in ("PyTorch's layers", *scalings))]
    # The losses of bf16 are within 2e-2 of PyTorch's, and those of FP8 within 0.1.
    assert [finding.holds for finding in section.findings[1:5]] == [True] * 4
    missing = ("model.backend", "model.fp8", "model.gpu_kernels")
    for config, overrides in runs:
        run = load_config(config, overrides)
        problems = [str(each) for each in validate(run, 1, resolve_parallel(run, 1))]
        assert all(problem.startswith(missing) for problem in problems), problems


def test_a_layout_that_differs_or_fails_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu import parity, ranks
    from gpu.findings import Machine, Section
    from gpu.report import summary

    calls: list[int] = []

    def train(machine: Machine, num_ranks: int, *_: object) -> list[dict[str, Any]]:
        calls.append(num_ranks)
        if len(calls) == 3:
            raise ranks.Failed("rank 1: out of memory")
        return [record(4.0 if len(calls) == 1 else 4.1, [4, 4])]

    monkeypatch.setattr(parity, "train", train)
    section = Section("parity")
    parity.run(Machine("cpu", 2, quick=True), section)
    section.judge()
    assert [finding.holds for finding in section.findings] == [False, True, False]
    assert section.status == "failed"
    assert summary(section) == "parity: failed: one rank, ZeRO 0, EP 2, ZeRO 1"
    assert section.findings[-1].value == "rank 1: out of memory"


def test_uneven_counts_sum_to_the_rows_and_leave_an_expert_empty() -> None:
    from gpu.rates import uneven_counts

    counts_E = uneven_counts(1000, 7)
    assert counts_E.sum() == 1000
    assert counts_E[-1] == 0
    assert torch.equal(counts_E, counts_E.sort(descending=True).values)


def test_the_report_holds_all_findings(tmp_path: Path) -> None:
    from gpu.findings import Machine, Section
    from gpu.report import write_report

    machine, section = Machine("cpu", 2, quick=True), Section("rates")
    section.add("product <b>", 12.3456, "TFLOP/s", holds=True, note="a & b")
    section.judge()
    write_report([section, Section("step", reason="the time was over", status="skipped")], machine, tmp_path)
    data = json.loads((tmp_path / "report.json").read_text())
    assert [each["status"] for each in data["sections"]] == ["passed", "skipped"]
    assert Section.from_data(data["sections"][0]) == section


def test_a_section_that_wrote_nothing_is_empty(tmp_path: Path) -> None:
    from gpu.findings import Section
    from gpu.report import load_section

    assert load_section(tmp_path / "none.json", "rates") == Section("rates")
    (tmp_path / "torn.json").write_text('{"name": "ra')
    assert load_section(tmp_path / "torn.json", "rates") == Section("rates")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        pytest.param([], "error: no CUDA device found", marks=NO_CUDA),
        (["--device", "cpu", "--sections", "rats"], "error: --sections: there is no 'rats'; there are en"),
        (["--device", "cpu", "--output", "/proc/none"], "error: --output: cannot make the folder /proc/none"),
    ],
)
def test_mistakes(arguments: list[str], line: str, mistake: Callable[..., str]) -> None:
    import gpu_check

    assert mistake(gpu_check.main, arguments).startswith(line)


def test_nothing_is_left_of_a_process_that_is_not_finished_in_time(tmp_path: Path) -> None:
    """A launcher's ranks have sessions of their own, and no parent when it is killed."""
    from gpu.ranks import MARK, marked, run_process

    rank = "import sys, time; print('rank', file=sys.stderr, flush=True); time.sleep(600)"
    launcher = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {rank!r}],"
    launcher += " start_new_session=True); time.sleep(600)"
    log = tmp_path / "launcher.log"
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={MARK: "/other"})
    try:
        variables = {MARK: f"/{tmp_path.name}"}
        code, _ = run_process([sys.executable, "-c", launcher], variables, log, timeout_s=5)
        assert code is None
        assert log.read_text() == "rank\n"
        assert marked(f"/{tmp_path.name}") == []
        assert started.poll() is None  # what this command did not start runs on
    finally:
        started.kill()
        started.wait()


def test_a_failed_rank_is_told_by_its_own_error(tmp_path: Path) -> None:
    """Neither by what the other ranks say of it, nor by the launcher's report."""
    from gpu.ranks import last_lines

    elastic = "E1124 17:31:53.492000 16204 torch/distributed/elastic/multiprocessing/api.py:1002]"
    log = tmp_path / "training.log"
    log.write_text(
        "Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory.\n"
        + "Connection closed by peer\n" * 20
        + f"{elastic} failed (exitcode: 1) local_rank: 0 (pid: 16255)\n"
        + "ChildFailedError: \nRoot Cause (first observed failure):\n" * 10
    )
    told = last_lines(log, lines=2)
    once = "Connection closed by peer"
    assert told == f"torch.OutOfMemoryError: CUDA out of memory. | {once} | {once} (all of it: training.log)"


def test_findings_are_written_as_they_come(tmp_path: Path) -> None:
    from gpu.findings import Machine, Section
    from gpu.report import assumptions, load_section, summary
    from megamoe.apps.plan.assumptions import ASSUMED, read

    path = tmp_path / "attention.json"
    section = Section("attention", path=path)
    section.add("head 64", 300.0, "TFLOP/s")
    section.expect("attention", 96, "forward", 0.3, "cuDNN")
    found = load_section(path, "attention")
    assert found.findings == section.findings
    expected = f"attention, head size from 0, forward: expected {ASSUMED.of('attention', 96, 'forward'):.1%}"
    assert summary(found).splitlines()[0] == f"  {expected}, found 30.0%"
    file = tmp_path / "assumptions.json"
    file.write_text(json.dumps(assumptions([found], Machine("cuda", 1, quick=False))))
    changed = ASSUMED.changed(read(str(file)))
    assert changed.of("attention", 64, "forward") == 0.3
    assert changed.of("attention", 128, "forward") == ASSUMED.of("attention", 128, "forward")
    assert len(changed.rows) == len(ASSUMED.rows)
    file.write_text(json.dumps(assumptions([found], Machine("cpu", 1, quick=True))))
    with pytest.raises(UserError, match="a rehearsal"):
        read(str(file))


def test_idle_time_is_what_no_kernel_covers() -> None:
    from gpu.trace import idle_share

    assert idle_share([(0, 4), (1, 2), (3, 5), (7, 10)]) == pytest.approx(2 / 10)
    assert idle_share([]) == 0


def test_the_kernels_sections_cover_all_passes() -> None:
    from gpu.kernels import FAMILIES, SIZES, passes

    names = {each.name for each in passes(SIZES["cpu"], torch.float32, torch.device("cpu"))}
    assert names == {name for family in FAMILIES.values() for name in family}


@pytest.mark.full
def test_a_rehearsal_of_all_sections(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu_check.py", "--device", "cpu", "--minutes", "60"]
    command += ["--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "report.json").read_text())
    expected = {"transformer_engine": "skipped", "tiles": "skipped"}
    for section in data["sections"]:
        assert section["status"] == expected.get(section["name"], section["status"]), section
        assert section["status"] in ("passed", "measured", "skipped"), section
    assert data["rehearsal"] is True


def test_rounding_near_zero_is_no_error_of_a_kernel() -> None:
    """Two right implementations give an output near 0 different signs; a wrong one is found."""
    from gpu.findings import Section
    from gpu.kernels import PLAIN, Kernels, Pass, _compare

    ours = Kernels(compiled=True, triton=True, triton_products=True)
    inputs = (torch.linspace(-1, 1, 9).requires_grad_(),)

    def rounded(values: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return values + (1e-9 if kernels == PLAIN else 0)

    def wrong(values: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return values * (1 if kernels == PLAIN else 1.001)

    section = Section("kernels")
    for call in (rounded, wrong):
        _compare(section, call.__name__, Pass(call.__name__, call, inputs), ours, 1e-5)
    assert [finding.holds for finding in section.findings if finding.holds is not None] == [True, False]
