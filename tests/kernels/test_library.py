"""How the library is built, kept, found, and done without; most tests build a small one instead."""

import atexit
import multiprocessing
import os
import pwd
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megamoe.cpu_kernels import library as kernels
from megamoe.kernels.choice import Kernels
from megamoe.kernels.library import PASSES, SUFFIXES, find_library
from tests.support.moe.build import make_hidden, make_layer, moe_config

GCC = shutil.which("g++")
pytestmark = pytest.mark.skipif(GCC is None, reason="no g++")
NAMES = ["has_tiles", "sort_by_key", "sum_of_squares", "adamw"]
NAMES += [f"{name}_{SUFFIXES[dtype]}" for name, each in PASSES.items() for dtype in each.dtypes]


@pytest.fixture(autouse=True)
def _found_again() -> Iterator[None]:
    find_library.cache_clear()
    yield
    find_library.cache_clear()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder, sources that compile fast, and temporary folders that are deleted with the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "sources").mkdir()
    functions = "".join(f'extern "C" int {name}() {{ return 1; }}\n' for name in NAMES)
    (tmp_path / "sources" / "small.cpp").write_text(functions)
    monkeypatch.setattr(kernels, "SOURCES", tmp_path / "sources")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "cache" / "megamoe"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a script CXX; -> the file of what it was asked for, a line each time."""

    def make(script: str) -> Path:
        asked, path = tmp_path / "asked", tmp_path / "compiler"
        path.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n{script}\n')
        path.chmod(0o700)
        monkeypatch.setenv("CXX", str(path))
        return asked

    return make


def builds(asked: Path) -> int:
    return sum("-shared" in line for line in asked.read_text().splitlines())


def test_it_is_built_once(cache: Path, compiler: Callable[[str], Path], tmp_path: Path) -> None:
    asked = compiler(f'exec {GCC} "$@"')
    path = kernels._built()
    built_at = path.stat().st_mtime_ns
    assert path.parent == cache and cache.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o077 == 0
    assert kernels._built() == path and path.stat().st_mtime_ns == built_at
    assert builds(asked) == 1
    found, problem = find_library()
    assert found is not None and found.has_tiles and problem == ""
    with (tmp_path / "sources" / "small.cpp").open("a") as file:
        file.write("// another source has another name\n")
    assert kernels._built() != path and builds(asked) == 2
    assert sorted(cache.iterdir()) == sorted({path, kernels._built()})


def test_a_file_that_others_may_write_is_built_anew(cache: Path, compiler: Callable[[str], Path]) -> None:
    asked = compiler(f'exec {GCC} "$@"')
    path = kernels._built()
    path.write_text("not ours")
    path.chmod(0o722)
    assert kernels._built() == path and builds(asked) == 2
    assert path.stat().st_mode & 0o777 == 0o700 and path.read_bytes().startswith(b"\x7fELF")
    elsewhere = path.rename(cache / "elsewhere")
    path.symlink_to(elsewhere)
    assert kernels._built() == path and builds(asked) == 3 and not path.is_symlink()


@pytest.mark.parametrize("damage", ["a bit", "a pipe"])
def test_a_damaged_file_is_built_anew(cache: Path, compiler: Callable[[str], Path], damage: str) -> None:
    asked = compiler(f'exec {GCC} "$@"')
    path = kernels._built()
    content = path.read_bytes()
    if damage == "a pipe":  # whose opening would wait
        path.unlink()
        os.mkfifo(path, 0o700)
    else:
        path.write_bytes(content[:-999] + bytes([content[-999] ^ 1]) + content[-998:])
    assert kernels._built() == path and builds(asked) == 2 and find_library()[0] is not None


def test_a_folder_that_others_may_write_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    at_exit = []
    monkeypatch.setattr(atexit, "register", lambda *call, **more: at_exit.append((call, more)))
    path = kernels._built()
    assert path.parent.parent == Path(tempfile.gettempdir()) and path.is_file()
    assert not list(cache.iterdir())
    [((remove, *arguments), more)] = at_exit
    remove(*arguments, **more)
    assert not path.parent.exists()


@pytest.mark.parametrize("home", ["none", "a file"])
def test_without_a_home_directory(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("XDG_CACHE_HOME")
    if home == "none":
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(pwd, "getpwuid", nobody)
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert find_library()[1] == ""
    assert [folder.name[:8] for folder in (tmp_path / "temporary").iterdir()] == ["megamoe-"]


def test_the_cache_is_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kernels._built().parent == tmp_path / ".cache" / "megamoe"


def test_without_a_compiler_layers_are_plain(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert find_library() == (None, "no C++ compiler was found; install g++")
    hidden_TH = make_hidden(4).requires_grad_()
    output_TH = make_layer(moe_config(num_experts=4))(hidden_TH)
    output_TH.sum().backward()
    assert hidden_TH.grad is not None and bool(output_TH.isfinite().all()) and not cache.exists()
    assert Kernels().library_for(torch.ones(2)) is None


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo clang version 19.1.7", "is not GCC; install g++, or name it in CXX"),
        (f'exec {GCC} --no-such-option "$@"', "unrecognized command-line option"),
        (f'[ "$1" = --version ] && exec {GCC} --version; exit 3', "failed: exit code 3"),
        (f'[ "$1" = --version ] && exec {GCC} --version; exit 0', "No such file or directory"),
    ],
    ids=["clang", "a wrong option", "no word", "nothing made"],
)
def test_a_compiler_that_fails(
    script: str, problem: str, compiler: Callable[[str], Path], cache: Path
) -> None:
    compiler(script)
    found, output = find_library()
    assert found is None and problem in output and len(output.splitlines()) == 1
    assert not cache.exists() or not list(cache.iterdir())


def test_what_the_compiler_says_is_the_reason(tmp_path: Path) -> None:
    (tmp_path / "sources" / "small.cpp").write_text("int f() {\n  return nothing;\n}\n")
    found, output = find_library()
    assert found is None and "small.cpp:2:10: error: " in output and "nothing" in output
    assert len(output.splitlines()) == 1


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    found, output = find_library()
    assert found is None and output.startswith("/nowhere/g++ cannot be run: ")


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"\x7fELF" + bytes(5000)], ids=["empty", "text", "zeros"]
)
def test_a_broken_file_is_built_anew(content: bytes, compiler: Callable[[str], Path]) -> None:
    asked = compiler(f'exec {GCC} "$@"')
    kernels._built().write_bytes(content)
    assert find_library()[0] is not None
    assert builds(asked) == 2


def test_a_compiler_that_makes_broken_files(compiler: Callable[[str], Path]) -> None:
    make_garbage = 'for last; do :; done; echo garbage > "$last"'
    asked = compiler(f'[ "$1" = --version ] && exec {GCC} --version; {make_garbage}')
    found, output = find_library()
    assert found is None and len(output.splitlines()) == 1 and ".so" in output
    assert builds(asked) == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_two_processes_at_once(
    cache: Path, compiler: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits until both compile; both have one id, as in two containers."""
    both = f"[ $(grep -c shared {tmp_path}/asked) = 2 ] || [ $((n += 1)) = 500 ]"
    both = f'n=0; [ "$1" = --version ] || until {both}; do sleep 0.01; done'
    asked = compiler(f'{both}\nexec {GCC} "$@"')
    monkeypatch.setattr(os, "getpid", lambda: 17)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=find_and_exit) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert builds(asked) == 2
    assert [path.name[:8] for path in cache.iterdir()] == ["kernels-"]
    assert find_library()[0] is not None and builds(asked) == 2


def find_and_exit() -> None:
    os._exit(0 if find_library()[0] is not None else 1)
