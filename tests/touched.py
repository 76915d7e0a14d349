"""Runs the tests that are nearest to the touched files, for a minute at most: `make test-quick`.

    python tests/touched.py                      # what differs from the branch `main`, new files included
    python tests/touched.py --since HEAD~3       # what differs from another commit
    python tests/touched.py megamoe/moe/rng.py   # as if these files were touched
    python tests/touched.py --list               # the test files in their order, without running them

The order: the touched tests; tests of the touched file by its name; the folder that mirrors its own; tests
that import it, directly before indirectly; the other tests of its package. When the time is up, the remaining
tests are left out and counted: `make test` runs them all. The exit code is pytest's: 0 passed, 1 failed; 5,
nothing to run, is taken as 0.
"""

import argparse
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("megamoe", "tests", "benchmarks", "examples", "tools")
IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]*(\([^)]*\)|[^\n#]*)|import[ \t]+([^\n#]+))", re.MULTILINE
)
FAR = 99  # the distance of a test that no chain of imports leads to
MOST_FILES = 40  # what pytest collects within some seconds
LEAST_S = 15.0  # for tests, on a machine that is busy with other things
BUDGET_S = 45.0  # to start tests in; imports before them and the last test after it take the rest of a minute


def touched_files(since: str) -> list[str]:
    """What differs from where this branch left `since`, and files that git does not know yet."""
    base = git("merge-base", "HEAD", since)[0]
    return sorted({*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")})


def git(*arguments: str) -> list[str]:
    """The lines that a git command prints."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: git {' '.join(arguments)}: {done.stderr.strip()}; name the files instead")
    return done.stdout.split()


@cache
def modules() -> dict[str, Path]:
    """Path of each module by its dotted name."""
    paths = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    return {name_of(path): path for path in paths}


def name_of(path: Path) -> str:
    """`megamoe.moe` of megamoe/moe/__init__.py, `megamoe.moe.rng` of megamoe/moe/rng.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def text_of(path: Path) -> str:
    """A file's text, read once."""
    return path.read_text(encoding="utf-8")


def imports_of(path: Path) -> Iterator[str]:
    """The modules of this repository that a file imports, also inside functions and in code that it writes.

    Found by the text: a syntax tree of each file would take most of the time of a short `make test-quick`.
    """
    for module, chosen, plain in IMPORT.findall(text_of(path)):
        listed = re.sub(r"#[^\n]*|[()\s\\]+", " ", chosen or plain).split(",")
        for name in (each.split()[0] for each in listed if each.strip()):
            name = f"{module}.{name}" if module else name
            found = name if name in modules() else name.rpartition(".")[0]
            if found in modules():
                yield found


@cache
def importers() -> dict[str, set[str]]:
    """For each module, the modules that import it."""
    found: dict[str, set[str]] = {}
    for name, path in modules().items():
        for imported in imports_of(path):
            found.setdefault(imported, set()).add(name)
    return found


def distances(touched: Iterable[Path]) -> dict[Path, int]:
    """How many imports lie between each file and the nearest touched one."""
    queue = deque((name_of(path), 0) for path in touched if path in modules().values())
    found: dict[str, int] = {}
    while queue:
        name, steps = queue.popleft()
        if name not in found:
            found[name] = steps
            queue.extend((importer, steps + 1) for importer in importers().get(name, ()))
    return {modules()[name]: steps for name, steps in found.items()}


def nearness(test: Path, touched: Path) -> int:
    """How near a test stands to a touched file by names alone: 0 the file itself, FAR nothing in common."""
    if test == touched:
        return 0
    inside = touched.relative_to(ROOT).parts
    place = test.relative_to(ROOT / "tests").parent.parts
    if test.stem == f"test_{touched.stem}":
        return 1
    if touched.suffix != ".py" or inside[0] not in ("megamoe", "tests"):
        mentioned = (f"{inside[-1]}", f'tool("{touched.stem}")', f"{inside[0]}/", f'"{inside[0]}"')
        return next((2 + n for n, word in enumerate(mentioned) if word in text_of(test)), FAR)
    folder = inside[1:-1]
    if inside[0] == "megamoe" and place and place == folder[: len(place)]:
        return 2 + len(folder) - len(place)
    return 5 if inside[0] == "megamoe" and place[:1] == folder[:1] != ("apps",) else FAR


def nearest_tests(touched: list[str]) -> list[Path]:
    """The test files from the nearest to the farthest, without those that nothing leads to."""
    paths = [ROOT / name for name in touched if (ROOT / name).is_file()]
    steps = distances(paths)
    tests = sorted((ROOT / "tests").rglob("test_*.py"))

    def place(test: Path) -> tuple[int, int]:
        by_import = steps.get(test, FAR)
        by_name = min((nearness(test, path) for path in paths), default=FAR)
        # An import of the file itself counts as much as the folder that mirrors its own.
        return min(by_name, 1 + by_import, FAR), by_import

    placed = sorted((place(test), test) for test in tests)
    return [test for (first, _), test in placed if first < FAR]


class Deadline:
    """Leaves out the tests that would begin after the budget of seconds.

    However long the imports took, the first tests have some seconds.
    """

    def __init__(self, budget_s: float, start_s: float) -> None:
        self.end_s, self.left_out = start_s + budget_s, 0

    def pytest_collection_finish(self) -> None:
        """Begin with the tests."""
        self.end_s = max(self.end_s, time.monotonic() + LEAST_S)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """True, which is to say that nothing is left to do, for what would begin too late."""
        if time.monotonic() <= self.end_s:
            return None
        self.left_out += 1
        return True


def run(tests: list[Path], start_s: float) -> int:
    """Run the tests in their order until the time is up; return the exit code."""
    deadline = Deadline(BUDGET_S, start_s)
    options = ["-q", "-m", "not full", "-r", "fE", "-p", "no:xdist", "-p", "no:randomly"]
    code = pytest.main([*options, *map(str, tests)], plugins=[deadline])
    if deadline.left_out:
        print(f"{deadline.left_out} tests did not fit into the time; `make test` runs them all")
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)


def main(arguments: list[str] | None = None) -> int:
    """Choose, say what was chosen, and run."""
    start_s = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", help="as if these files were touched")
    parser.add_argument("--since", default="main", help="a commit or branch (default: main)")
    parser.add_argument("--list", action="store_true", help="print the test files in their order")
    args = parser.parse_args(arguments)
    touched = args.files or touched_files(args.since)
    missing = [name for name in args.files if not (ROOT / name).is_file()]
    if missing:
        parser.error(f"{missing[0]}: no such file in {ROOT}")
    tests = nearest_tests(touched)
    if args.list:
        print("\n".join(str(test.relative_to(ROOT)) for test in tests))
        return 0
    chosen = tests[:MOST_FILES]
    print(f"{len(touched)} files touched, {len(chosen)} of {len(tests)} test files near them")
    return run(chosen, start_s) if chosen else 0


if __name__ == "__main__":
    sys.exit(main())
