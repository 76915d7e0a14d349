"""The versions of torch, Megatron-Core and DeepSpeed: the bounds agree, and others are told or refused."""

import gc
import importlib
import importlib.metadata
import importlib.util
import re
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import pretrain_gpt_moe
from megamoe.compat.startup import TESTED, check_versions, configure_libraries, importing
from megamoe.errors import UserError

ROOT = Path(__file__).parents[2]


def have(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """The installed versions, but for these."""
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or real(name))


def requirements() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {parsed.name: parsed for parsed in map(Requirement, project["dependencies"])}


@pytest.mark.parametrize("name", TESTED)
def test_the_bounds_are_those_of_pyproject(name: str) -> None:
    _, oldest, untested = TESTED[name]
    assert {str(bound) for bound in requirements()[name].specifier} == {f">={oldest}", f"<{untested}"}


@pytest.mark.parametrize(
    "constraints", sorted((ROOT / "constraints").glob("python*.txt")), ids=lambda path: path.name
)
def test_the_pinned_versions_lie_within_every_bound(constraints: Path) -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", constraints.read_text(), flags=re.MULTILINE))
    for name, requirement in requirements().items():
        assert requirement.specifier.contains(pinned[name]), name


@pytest.mark.parametrize(
    "torch", ["2.13.0", "2.13", "2.15.9+cu130", "2.13.0a0+nv26.4", "unknown"], ids=lambda version: version
)
def test_tested_versions_are_taken_in_silence(
    torch: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    have(monkeypatch, torch=torch)
    check_versions()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "found", "way_out"),
    [
        ("torch", "2.16.0+cpu", "pip install 'torch>=2.13,<2.16'"),
        ("torch", "2.16.0a0+nv", "pip install 'torch>=2.13,<2.16'"),
        ("megatron-core", "0.20.0", "pip install 'megatron-core>=0.16.1,<0.20'"),
        ("deepspeed", "1.0", "pip install 'deepspeed>=0.19.8,<0.20'"),
    ],
)
def test_a_newer_version_is_one_warning_on_the_first_rank(
    name: str, found: str, way_out: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    have(monkeypatch, **{name: found})
    monkeypatch.setenv("RANK", "1")
    check_versions()
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    check_versions()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {name}: found version {found}, tested from ")
    assert line.endswith(way_out)


def test_an_older_version_ends_the_program_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    have(monkeypatch, **{"megatron-core": "0.16.0"})
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_moe.py", "--config", "examples/demo.yaml"])
    assert pretrain_gpt_moe.main() == 2
    assert capsys.readouterr().err == (
        "error: megatron-core: found version 0.16.0, expected 0.16.1 or later; "
        "pip install 'megatron-core>=0.16.1,<0.20'\n"
    )
    monkeypatch.setenv("MEGAMOE_ANY_VERSION", "1")
    check_versions()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: megatron-core: found version 0.16.0, tested from 0.16.1 up to")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    check_versions()  # source trees without metadata
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="torch: not installed, expected 2.13 or later; pip install"):
        check_versions()


def sources_of(module: str) -> Iterator[str]:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    for path in sorted(Path(spec.origin).parent.rglob("*.py")):
        yield path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("megatron.core.transformer", "full scope is deprecated"),
        ("megatron.core.models.gpt", "Apex is not installed"),
        ("torch.distributed", "@deprecated"),
    ],
)
def test_the_libraries_would_warn_at_import(module: str, message: str) -> None:
    """The libraries that `configure_libraries` silences."""
    assert any(message in source for source in sources_of(module))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="a DeprecationWarning before Python 3.12")
def test_a_fault_in_a_string_is_silent_in_megatron_and_told_in_a_plugin(restored_process: None) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        configure_libraries()
        for file in ("/site-packages/megatron/core/allocator.py", "/home/me/plugin.py"):
            compile("'\\-'", file, "exec")
    assert [warning.filename for warning in told] == ["/home/me/plugin.py"]


def test_imports_are_left_out_of_garbage_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_process: None
) -> None:
    """What was imported is frozen; if all was imported before, or nobody collects, nothing changes."""
    (tmp_path / "made_for_this_test.py").write_text("import gc\nCOLLECTS, LISTS = gc.isenabled(), [[], []]\n")
    monkeypatch.syspath_prepend(tmp_path)
    gc.unfreeze()
    try:
        with importing():
            module = importlib.import_module("made_for_this_test")
        assert not module.COLLECTS and gc.isenabled() and gc.get_freeze_count() > 1000
        gc.unfreeze()
        with importing():
            importlib.import_module("made_for_this_test")
        assert gc.isenabled() and gc.get_freeze_count() < 1000
        gc.disable()
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.freeze()
        sys.modules.pop("made_for_this_test", None)
