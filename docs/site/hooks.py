"""What MkDocs calls while it builds the site (`make docs`): generated pages, and links out of docs/.

Generated are the reference of the code (a page for each folder of megamoe, by mkdocstrings, which reads the
sources and imports nothing), the commands and exit codes, and a page for each file of the repository that a
page links to. A page of docs/ keeps the links that work in the repository; here they are turned towards these
pages.
"""

import ast
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megamoe"
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# Pages of the repository that the navigation names, beside what other pages link to.
WHOLE = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
WAY_ON = "Next: [the packages](../change/architecture.md), [commands and exit codes](commands.md).\n"
# A script that the search needs where the site is opened from the disk.
WORKER = "assets/iframe-worker.js"
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sbatch": "bash", ".toml": "toml"}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    worker = {WORKER: (Path(__file__).parent / "iframe-worker.js").read_text(encoding="utf-8")}
    for uri, text in {**repository_pages(), **reference_pages(), **worker}.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_config(config: Any) -> Any:
    """Put the generated reference at the end of the navigation."""
    config.nav.append({"Reference": sorted(reference_pages(), key=lambda uri: (uri != REFERENCE, uri))})
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links out of docs/ towards the generated pages."""
    if page.file.src_uri.startswith("reference/"):
        return markdown
    return with_links(markdown, page.file.src_uri)


def outside_fences(text: str) -> Iterator[tuple[int, str]]:
    """The parts of a page between its blocks of code, each with its place."""
    place = 0
    for fence in FENCE.finditer(text):
        yield place, text[place : fence.start()]
        place = fence.end()
    yield place, text[place:]


def repository_path(uri: str) -> str:
    """Where the text of a page lies in the repository."""
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"


def site_uri(path: str) -> str:
    """The page that shows a file of the repository; files of docs/ are their own."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def target_of(link: str, uri: str) -> str | None:
    """The path in the repository that a link leads to; None for the web and for places on the page."""
    bare = link.split("#")[0]
    if not bare or "://" in link or link.startswith("mailto:"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(repository_path(uri)), bare))


def with_links(markdown: str, uri: str) -> str:
    """The page with each link that leads out of its part of the site turned towards a page of the site."""

    def turned(match: re.Match[str]) -> str:
        link = match[2]
        path = target_of(link, uri)
        inside = uri.startswith("repository/")
        if path is None or (path.startswith("docs/") and not inside):
            return match[0]
        if (ROOT / path).is_dir():
            path = f"{path}/README.md"
        if not (ROOT / path).is_file():
            return match[0]  # which MkDocs then reports
        anchor = link[link.index("#") :] if "#" in link else ""
        return (
            f"{match[1]}{posixpath.relpath(site_uri(path), posixpath.dirname(uri) or '.')}{anchor}{match[3]}"
        )

    pieces, place = [], 0
    for start, text in outside_fences(markdown):
        pieces += [markdown[place:start], LINK.sub(turned, text)]
        place = start + len(text)
    return "".join(pieces)


def repository_pages() -> dict[str, str]:
    """A page for each file outside of docs/ that a page links to, and for what those link to."""
    found: dict[str, str] = {}
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.parent != Path(__file__).parent]
    waiting = [(path.relative_to(ROOT / "docs").as_posix(), path) for path in pages]
    waiting += [(site_uri(name), ROOT / name) for name in WHOLE]
    while waiting:
        uri, path = waiting.pop()
        text = path.read_text(encoding="utf-8")
        if uri.startswith("repository/"):
            if uri in found:
                continue
            found[uri] = text if path.suffix == ".md" else code_page(path, text)
        if path.suffix != ".md":
            continue
        for _, part in outside_fences(text):
            for _, link, _ in LINK.findall(part):
                name = target_of(link, uri)
                if name and (ROOT / name).is_dir():
                    name = f"{name}/README.md"
                if name and not name.startswith("docs/") and (ROOT / name).is_file():
                    waiting.append((site_uri(name), ROOT / name))
    return found


def code_page(path: Path, text: str) -> str:
    """A file of the repository as a page."""
    name = path.relative_to(ROOT).as_posix()
    fence = "`" * (3 + max((len(run) for run in re.findall("`{3,}", text)), default=0))
    up = os.path.relpath("change/architecture.md", posixpath.dirname(site_uri(name)))
    return (
        f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n{fence}{LANGUAGES.get(path.suffix, 'text')}\n"
        f"{text}{fence}\n\nNext: [the packages]({up}) and where each mechanism stands.\n"
    )


REFERENCE = "reference/commands.md"


def reference_pages() -> dict[str, str]:
    """Commands with exit codes, and a page for each folder of the package."""
    found = {REFERENCE: commands_page()}
    folders = sorted({path.parent for path in PACKAGE.rglob("*.py")})
    for folder in folders:
        modules = [
            path for path in sorted(folder.glob("*.py")) if ast.get_docstring(ast.parse(path.read_text()))
        ]
        name = ".".join(folder.relative_to(ROOT).parts)
        names = [name if path.stem == "__init__" else f"{name}.{path.stem}" for path in modules]
        blocks = [f"::: {each}\n" for each in names]
        title = name.removeprefix("megamoe.")
        found[f"reference/{name}.md"] = "\n".join([f"# {title}\n", *blocks, WAY_ON])
    return found


def commands_page() -> str:
    """The subcommands and the exit codes, from the tables in the code."""
    from megamoe.cli import COMMANDS, summary_of

    rows = [
        f"| `megamoe {name}` | `{module}` | {summary_of(name)} |" for name, module in sorted(COMMANDS.items())
    ]
    errors = (PACKAGE / "errors.py").read_text(encoding="utf-8")
    codes = re.findall(r"^    ([A-Z]+) = (\d+)  # (.+)$", errors, flags=re.MULTILINE)
    return "\n".join(
        [
            "# Commands and exit codes\n",
            "`--help` shows the arguments. In a clone, `tools/*.py` are the same commands.\n",
            "| command | module | what it does |\n|---|---|---|",
            *rows,
            "\n## Exit codes\n",
            "| code | name | meaning |\n|---|---|---|",
            *(f"| {number} | {name} | {meaning} |" for name, number, meaning in codes),
            "\nNext: [what launchers make of them](../run/runs.md#exit-codes),"
            " [the keys of a run](../run/configuration.md).\n",
        ]
    )
