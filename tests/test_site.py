"""The documentation as a site (`make docs`): every page is reachable, every public docstring is there, and
nothing is loaded from the web. The build takes minutes and needs the extra `docs`, so that is a full test.
"""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.support.tiny import tool
from tools.list_keys import GENERATED

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LOADED = re.compile(
    r'<(?:script|img|iframe|source)\b[^>]*\bsrc="(?:https?:)?//|<link\b[^>]*rel="(?:stylesheet|preconnect|icon)"'
    r'[^>]*href="(?:https?:)?//'
)


def pages_in(tree: Any) -> Iterator[str]:
    """The pages that a part of the navigation names."""
    for each in tree if isinstance(tree, list) else tree.values() if isinstance(tree, dict) else [tree]:
        if isinstance(each, str):
            yield each
        else:
            yield from pages_in(each)


def test_the_navigation_has_every_page_once() -> None:
    named = list(pages_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    written = {path for path in DOCS.rglob("*.md") if path not in GENERATED} | set(GENERATED.values())
    assert len(named) == len(set(named))
    pages = {DOCS / page for page in named if not page.startswith("repository/")}
    assert pages == written - {DOCS / "LOG.md"}


def test_make_docs_ends_with_an_error_at_a_warning() -> None:
    """By --strict, and not with --quiet: mkdocs then counts no warning and ends with 0 (seen with 1.6.1)."""
    (recipe,) = re.findall(r"-m mkdocs build (.+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert "--strict" in recipe.split() and not {"--quiet", "-q"} & set(recipe.split())


@pytest.fixture(name="hooks", scope="module")
def _hooks() -> ModuleType:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "site/hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_out_of_docs_lead_to_pages_of_the_site(hooks: ModuleType) -> None:
    text = "[a](../../megamoe/errors.py) [b](runs.md#resuming) `[c](../x)`\n```\n[d](../x.py)\n```"
    turned = hooks.with_links(text, "run/faults.md")
    assert "[a](../repository/megamoe/errors.py.md)" in turned and "[b](runs.md#resuming)" in turned
    assert "[d](../x.py)" in turned, "code stays as it is"
    assert (
        hooks.with_links("[a](../CONTRIBUTING.md#style)", "index.md")
        == "[a](repository/CONTRIBUTING.md#style)"
    )
    back = hooks.with_links("[a](docs/run/runs.md) [b](LICENSE)", "repository/CONTRIBUTING.md")
    assert back == "[a](../run/runs.md) [b](LICENSE.md)"
    pages = hooks.repository_pages()
    assert "repository/megamoe/moe/part.py.md" in pages and "repository/examples/slurm/README.md" in pages
    generated = {**hooks.reference_pages(), **{uri: text for uri, text in pages.items() if ".py." in uri}}
    assert len(generated) > 60 and all("\nNext: [" in text for text in generated.values())


def test_commands_and_exit_codes_are_those_of_the_code(hooks: ModuleType) -> None:
    from megamoe.cli import COMMANDS, summary_of
    from megamoe.errors import ExitCode

    page = hooks.commands_page()
    assert all(f"`megamoe {name}` | `{it}` | {summary_of(name)} |" in page for name, it in COMMANDS.items())
    assert all(f"| {code.value} | {code.name} | " in page for code in ExitCode)


def public(path: Path) -> Iterator[str]:
    """Dotted names of a module's public classes, functions and methods that have a docstring."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

    def within(tree: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                if ast.get_docstring(node):
                    yield f"{prefix}.{node.name}"
                if isinstance(node, ast.ClassDef):
                    yield from within(node, f"{prefix}.{node.name}")

    yield from within(ast.parse(path.read_text(encoding="utf-8")), module)


@pytest.mark.full
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_the_web(
    hooks: ModuleType, tmp_path: Path
) -> None:
    assert tool("list_keys").main([]) == 0
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    pages = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert len(pages) > 100
    assert [path.name for path, text in pages.items() if LOADED.search(text)] == []
    assert (tmp_path / "search/search_index.js").is_file()
    ids = {name for text in pages.values() for name in re.findall(r'id="(megamoe\.[\w.]+)"', text)}
    names = {name for path in (ROOT / "megamoe").rglob("*.py") for name in public(path)}
    assert len(names) > 1000 and names - ids == set()
