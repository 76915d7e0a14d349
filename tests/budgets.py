"""Budgets of lines: what each package, the tests and the pages may have. They only fall.

    python tests/budgets.py            the lines of each package beside its budget
    python tests/budgets.py --lower    lower the budgets to what is there; never raises one

A line of code is not blank, no comment and not of a docstring. `line_budgets.toml` has the budgets. A number
may rise where others fall by as much: `test_architecture.py` compares the sums with those of all earlier
versions of the file.
"""

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "line_budgets.toml"
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
OTHER_CODE = (".cpp", ".h", ".js", ".css")
GENERATED = ("docs/run/configuration.md", "docs/run/metrics.md", "docs/route/all_parts.md")
# What studies and `make docs` write, and the log.
NOT_READ = ("docs/lab/", "docs/log", "docs/LOG.md", *GENERATED)
TABLES = ("core", "applications", "other")
# The sums of the first version, for a tree without git's history.
MOST = {"core": 32_002, "package": 53_469, "other": 69_275}


@cache
def lines_of_code(path: Path) -> int:
    """The lines of code of one file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in OTHER_CODE:
        lines = (line.strip() for line in text.splitlines())
        return sum(bool(line) and not line.startswith(("//", "/*", "*")) for line in lines)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                code.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(code)


def files_of(name: str) -> list[Path]:
    """The files of a row: of a folder, or `megamoe/*.py`, the files beside the packages."""
    if name.endswith("*.py"):
        return sorted(ROOT.glob(name))
    suffixes = (".md",) if name == "docs" else (".py", *OTHER_CODE)
    files = (path for path in sorted((ROOT / name).rglob("*")) if path.suffix in suffixes)
    return [path for path in files if not str(path.relative_to(ROOT)).startswith(NOT_READ)]


def lines_now() -> dict[str, dict[str, int]]:
    """The lines of each row: code, of the row `docs` the lines of its pages."""
    return {
        table: {name: sum(map(_lines, files_of(name))) for name in rows} for table, rows in budgets().items()
    }


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines()) if path.suffix == ".md" else lines_of_code(path)


def budgets(text: str | None = None) -> dict[str, dict[str, int]]:
    """The tables of line_budgets.toml, or of another version's text."""
    parsed = tomllib.loads(FILE.read_text(encoding="utf-8") if text is None else text)
    return {table: parsed[table] for table in TABLES}


def sums(tables: dict[str, dict[str, int]]) -> dict[str, int]:
    """What may not rise: the core, core and applications together, and the rest."""
    core, applications, other = (sum(tables[table].values()) for table in TABLES)
    return {"core": core, "package": core + applications, "other": other}


def earlier_budgets() -> list[dict[str, dict[str, int]]]:
    """The committed versions of the file in this branch's history, the newest first; none without git."""
    name = str(FILE.relative_to(ROOT))
    listed = _git("log", "--first-parent", "--format=%H", "--", name)
    texts = [_git("show", f"{commit}:{name}") for commit in (listed or "").split()]
    return [budgets(text) for text in texts if text]


def _git(*arguments: str) -> str | None:
    try:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def main(arguments: list[str]) -> int:
    """Print the rows, or lower the budgets."""
    now, text = lines_now(), FILE.read_text(encoding="utf-8")
    for table, rows in budgets().items():
        for name, most in rows.items():
            lines = now[table][name]
            print(f"{name:32} {lines:7,} of {most:7,}{'  too many' if lines > most else ''}")
            if "--lower" in arguments and lines < most:
                text = text.replace(f'"{name}" = {most}\n', f'"{name}" = {lines}\n')
        print(f"{table:32} {sum(now[table].values()):7,} of {sum(rows.values()):7,}\n")
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
