"""Accelerators: refused by name where they are not, left alone where nobody asks, used where they are.

What needs them runs on stand-ins in a process of its own: see check_fakes.py. It has no GPU.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megamoe.errors import UserError
from megamoe.kernels import choice
from megamoe.kernels.choice import Kernels
from megamoe.model import backends
from megamoe.model.attention.core import SDPAttention
from megamoe.model.backends import backend_rows, is_installed, uses_apex_norms, uses_transformer_engine
from megamoe.model.linears import ColumnLinear, RowLinear
from megamoe.model.modules import choose_modules, fp8_options
from megamoe.train import resolved, saver, trainer
from tests.support.in_subprocess import ROOT, names_of_checks, verdicts_of
from tests.support.refusals import Case, cases, refusal
from tests.support.tiny import check_on, tiny

CHECKS = names_of_checks("tests/support/model/check_fakes.py", "tests/support/model/runs_on_fakes.py")
LONG = "runs_of_two_ranks"


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, str]:
    path = f"{ROOT / 'tests/support/fakes'}{os.pathsep}{ROOT}"
    return verdicts_of("tests.support.model.check_fakes", CHECKS, request, PYTHONPATH=path)


@pytest.mark.parametrize(
    "check", [pytest.param(check, marks=pytest.mark.full if check == LONG else ()) for check in CHECKS]
)
def test_with_fake_libraries(verdicts: dict[str, str], check: str) -> None:
    assert verdicts[check] == ""


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backends, "has_cuda", lambda: False)
    monkeypatch.setattr(backends, "is_installed", lambda name: False)
    finders = (backends.find_transformer_engine, backends.find_apex_norms)
    for find in finders:
        find.cache_clear()
    yield
    for find in finders:
        find.cache_clear()


@pytest.mark.parametrize("case", cases("backends"))
def test_what_is_not_here_is_refused_by_name(
    nothing_installed: None, case: Case, expect_message: Callable[..., None]
) -> None:
    expect_message(case, refusal(case.row))


def test_triton_is_refused_where_it_is_not_installed(
    nothing_installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "has_cuda", lambda: True)
    monkeypatch.setattr(backends, "triton_problem", lambda: "triton is not installed")
    check_on(tiny(), 1)
    with pytest.raises(UserError) as refused:
        check_on(tiny("model.gpu_kernels=triton"), 1)
    assert str(refused.value) == (
        "model.gpu_kernels: found triton, but triton is not installed; install it, or set "
        "model.gpu_kernels: plain"
    )
    monkeypatch.setattr(backends, "triton_problem", lambda: "")
    check_on(tiny("model.gpu_kernels=triton"), 1)


@pytest.mark.parametrize(("on_cpu", "on_gpu"), [("auto", "plain"), ("plain", "triton")])
def test_a_run_takes_the_kernels_that_it_names(
    on_cpu: str, on_gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice reaches the run folder; on the CPU freed memory is kept."""
    kept: list[bool] = []
    monkeypatch.setattr(resolved, "validate", lambda config, ranks, plan: [])
    monkeypatch.setattr(trainer, "keep_freed_memory", lambda: kept.append(True))
    monkeypatch.setattr(saver, "choose_run_folder", lambda config: sys.exit("far enough"))
    with pytest.raises(SystemExit, match="far enough"):
        trainer.Trainer(tiny(f"model.gpu_kernels={on_gpu}", f"model.cpu_kernels={on_cpu}"))
    assert kept == [True]
    with pytest.raises(SystemExit, match="far enough"):
        trainer.Trainer(tiny("model.keep_freed_memory=false"))
    assert kept == [True]


def test_the_summary_names_the_gpus_kernels_where_there_is_one(
    nothing_installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "GPU kernels" not in backend_rows(tiny(), Kernels())
    monkeypatch.setattr(backends, "has_cuda", lambda: True)
    found = {}
    for is_hopper in (True, False):
        monkeypatch.setattr(backends, "has_grouped_product", lambda dtype, device, fast=is_hopper: fast)
        for name in ("plain", "triton", "auto"):
            for problem in ("", "no Triton here"):
                monkeypatch.setattr(backends, "triton_problem", lambda problem=problem: problem)
                monkeypatch.setattr(choice, "triton_problem", lambda problem=problem: problem)
                config = tiny(f"model.gpu_kernels={name}")
                rows = backend_rows(config, Kernels.of(config.model), "fp16")
                found[is_hopper, name, problem] = (rows["GPU kernels"], rows["experts' products"])
    triton = "Triton's: MoE rows, norms, rotary positions, loss"
    loop = "PyTorch's, which waits for the device and loops in fp16"
    assert found[True, "plain", ""] == ("PyTorch's (model.gpu_kernels: plain)", "PyTorch's")
    assert found[False, "plain", ""] == ("PyTorch's (model.gpu_kernels: plain)", loop)
    assert found[True, "triton", ""] == found[False, "triton", ""] == (triton, "Triton's")
    assert found[True, "auto", ""] == (triton, "PyTorch's")
    assert found[False, "auto", ""] == (triton, "Triton's")
    assert found[False, "auto", "no Triton here"] == ("PyTorch's: no Triton here", loop)


def test_triton_is_the_default_where_it_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for problem, expected in (("", True), ("no compiler", False)):
        monkeypatch.setattr(choice, "triton_problem", lambda problem=problem: problem)
        chosen = [Kernels.of(tiny(f"model.gpu_kernels={name}").model) for name in ("auto", "triton", "plain")]
        assert [kernels.triton for kernels in chosen] == [expected, True, False]
    assert tiny().model.gpu_kernels == "auto"


def test_what_triton_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As its `runtime/build.py` looks for it; a `cc` alone, or a CC of several words, is not called."""
    (tmp_path / "Python.h").touch()
    nowhere = tmp_path / "without"
    for package, cc, programs, headers, expected in (
        ("triton", None, {"gcc"}, tmp_path, ""),
        ("triton", "", {"clang"}, tmp_path, ""),
        ("triton", "icx", {"icx"}, tmp_path, ""),
        ("triton", None, {"cc"}, tmp_path, "triton needs a C compiler, and found neither gcc nor clang"),
        ("triton", "ccache gcc", {"gcc"}, tmp_path, "needs a C compiler, and found no 'ccache gcc' (CC)"),
        ("triton", None, {"gcc"}, nowhere, f"headers of Python, and {nowhere}/Python.h is missing"),
        ("other", None, {"gcc"}, tmp_path, "triton is not installed"),
    ):
        choice.triton_problem.cache_clear()
        monkeypatch.setattr("importlib.util.find_spec", lambda asked, name=package: asked == name or None)
        monkeypatch.setattr("shutil.which", lambda asked, found=programs: asked if asked in found else None)
        monkeypatch.setattr("sysconfig.get_paths", lambda scheme, at=headers: {"include": str(at)})
        monkeypatch.delenv("CC", raising=False) if cc is None else monkeypatch.setenv("CC", cc)
        problem = choice.triton_problem()
        assert expected in problem and bool(problem) == bool(expected)
    choice.triton_problem.cache_clear()


def test_without_them_everything_is_pytorchs(nothing_installed: None) -> None:
    config = tiny()
    check_on(config, 1)
    assert not uses_transformer_engine(config.model) and not uses_apex_norms(config.model)
    modules = choose_modules(config, Kernels())
    assert (modules.core_attention, modules.linears) == (SDPAttention, (ColumnLinear, RowLinear))
    assert modules.products.row_multiple == 1
    assert fp8_options(config.model) == {"fp8": None}
    summary = backend_rows(config, Kernels())
    assert (summary["Transformer Engine"], summary["Apex"]) == ("none", "none")


def test_another_package_of_that_name_is_not_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's `apex` is none of NVIDIA's, and another installation may not be whole."""
    for name in ("apex", "transformer_engine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("apex.normalization")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/__init__.py").write_text("import a_module_that_nobody_has")
    assert not is_installed("broken.normalization")
