"""Plants a fault for each promise of docs/ in a copy of the code, and checks that `make test` notices it.

    python tests/planted_faults.py              # all faults, each against the tests that should notice it
    python tests/planted_faults.py lock nul     # the faults of these names
    python tests/planted_faults.py --list       # name, promise and tests of each fault

`faults.yaml` lists the faults. A fault is a small edit of one file. It is noticed if one of its tests fails;
only tests that `make test` runs count. Before the faults, the same tests must pass on the copy as it is.
Exit code 1: a fault was not noticed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("megamoe", "tests", "tools", "examples", "ds_configs", "benchmarks", "docs", "constraints")
COPIED_FILES = ("pyproject.toml", "pretrain_gpt_moe.py", "README.md", "Makefile")
PASSED, FAILED = 0, 1  # pytest's exit codes


@dataclass(frozen=True)
class Fault:
    """An edit of `file` that breaks a promise: `before`, which occurs in it once, becomes `after`.

    name: for the command line. page: relative to docs/. tests: pytest's arguments.
    """

    name: str
    promise: str
    page: str
    file: str
    before: str
    after: str
    tests: list[str]


ROWS = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text(encoding="utf-8"))
FAULTS = [Fault(name, **row) for name, row in ROWS.items()]


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="faults to plant; default: all")
    parser.add_argument("--list", action="store_true", help="print the faults and plant none")
    options = parser.parse_args()
    known = {fault.name: fault for fault in FAULTS}
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no fault {unknown[0]!r}; choose from {', '.join(known)}")
    chosen = [known[name] for name in options.names] or FAULTS
    if options.list:
        for fault in chosen:
            print(f"{fault.name}: {fault.promise} (docs/{fault.page}); {', '.join(fault.tests)}")
        return 0
    with tempfile.TemporaryDirectory(prefix="planted_") as folder:
        return _plant_all(chosen, copy_of_code(Path(folder) / "code"))


def copy_of_code(target: Path) -> Path:
    """Copy what the tests need to `target`, and return it."""
    target.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in COPIED:
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    for name in COPIED_FILES:
        shutil.copy2(ROOT / name, target / name)
    return target


def _plant_all(faults: Sequence[Fault], copy: Path) -> int:
    if _run(copy, sorted({test for fault in faults for test in fault.tests})) != PASSED:
        print("error: the tests do not pass on the code as it is; mend that first", file=sys.stderr)
        return 1
    missed = [fault.name for fault in faults if not _is_noticed(fault, copy)]
    print(f"{len(faults) - len(missed)} of {len(faults)} faults noticed")
    if missed:
        print(f"error: not noticed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def _is_noticed(fault: Fault, copy: Path) -> bool:
    started = time.monotonic()
    path = copy / fault.file
    original = path.read_text(encoding="utf-8")
    path.write_text(planted(fault, original), encoding="utf-8")
    try:
        code = _run(copy, fault.tests)
    finally:
        path.write_text(original, encoding="utf-8")
    # Another exit code than FAILED is no notice: no tests, an error of usage or an interrupt.
    verdict = {FAILED: "noticed", PASSED: "NOT NOTICED"}.get(code, f"pytest ended with {code}")
    print(f"{fault.name}: {verdict} ({time.monotonic() - started:.0f} s)", flush=True)
    return code == FAILED


def planted(fault: Fault, original: str) -> str:
    """Return the file's text with the fault.

    Raises:
        ValueError: if the text to replace does not occur exactly once.
    """
    count = original.count(fault.before)
    if count != 1:
        raise ValueError(
            f"{fault.name}: expected {fault.before!r} once in {fault.file}, found it {count} times"
        )
    return original.replace(fault.before, fault.after)


def _run(copy: Path, tests: Iterable[str]) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not full", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
